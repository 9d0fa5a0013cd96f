//! One process of a sharded model: residual MLP layers, each a unit, applied several times in a row.

use std::time::Instant;

use anyhow::{Context as _, Result};
use replay_runtime::dist::Dist;
use replay_runtime::{Rollout, Sharded, replay_block};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::process::memory_mb;
use crate::sharded::Answer;

/// The model's sizes, as `peers_fsdp.py` takes them.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Shape {
    #[arg(long, default_value_t = 8)]
    layers: usize,
    #[arg(long, default_value_t = 512)]
    width: i64,
    #[arg(long, default_value_t = 64)]
    batch: i64,
    /// Timed steps; one more comes before them.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// How often a step applies the model.
    #[arg(long, default_value_t = 4)]
    rollouts: usize,
    /// Transfers overlap the blocks that run; FSDP2 has its own.
    #[arg(long)]
    overlap: bool,
}

impl Shape {
    /// In the order of the script's.
    pub(crate) fn values(&self) -> [String; 5] {
        let Self { layers, width, batch, steps, rollouts, .. } = self;
        [layers.to_string(), width.to_string(), batch.to_string(), steps.to_string(), rollouts.to_string()]
    }

    /// As options of this program.
    pub(crate) fn options(&self) -> Vec<String> {
        let names = ["--layers", "--width", "--batch", "--steps", "--rollouts"];
        let sizes = names.into_iter().zip(self.values()).flat_map(|(name, value)| [name.to_owned(), value]);
        sizes.chain(self.overlap.then(|| "--overlap".to_owned())).collect()
    }
}

struct Layer(nn::Linear, nn::Linear);

impl Layer {
    fn new(path: &nn::Path<'_>, width: i64) -> Self {
        // As torch.nn.Linear's, whose peers this is compared with.
        let linear = |name: &str, from: i64, to| {
            #[expect(clippy::cast_precision_loss, reason = "a width")]
            let most = 1.0 / (from as f64).sqrt();
            let init = nn::Init::Uniform { lo: -most, up: most };
            nn::linear(path / name, from, to, nn::LinearConfig { ws_init: init, bs_init: Some(init), bias: true })
        };
        Self(linear("up", width, 4 * width), linear("down", 4 * width, width))
    }

    // As the peers', whose checkpoint ends its recomputation there too.
    #[replay_block(early_stop)]
    fn forward(&self, state: &Tensor) -> Tensor {
        state + self.1.forward(&self.0.forward(state).gelu("none"))
    }
}

pub(crate) fn run(shape: &Shape) -> Result<()> {
    tch::set_num_threads(1);
    let dist = Dist::from_env()?;
    let base = memory_mb("VmRSS")?;
    tch::manual_seed(0);
    let vs = nn::VarStore::new(Device::Cpu);
    let layers: Vec<_> = (0..shape.layers).map(|i| Layer::new(&(vs.root() / "layers" / i), shape.width)).collect();
    let mut builder = Sharded::builder(&dist, &vs).overlap(shape.overlap);
    for (i, layer) in layers.iter().enumerate() {
        builder = builder.unit(&format!("layers.{i}"), layer);
    }
    let sharded = builder.build()?;
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-4)?;
    tch::manual_seed(i64::try_from(dist.rank())?);
    let data = Tensor::randn([shape.batch, shape.width], (Kind::Float, Device::Cpu)) / 10.0;
    let (mut times, mut loss) = (Vec::new(), f64::NAN);
    for _ in 0..=shape.steps {
        let started = Instant::now();
        loss = step(&sharded, &layers, &data, shape.rollouts)?;
        optimizer.step();
        sharded.zero_grad();
        dist.barrier()?;
        times.push(started.elapsed().as_secs_f64());
    }
    times.remove(0);
    times.sort_by(f64::total_cmp);
    let peak_mb = dist.all_gather(memory_mb("VmHWM")? - base)?;
    if dist.rank() == 0 {
        let seconds = *times.get(times.len() / 2).context("no step is timed")?;
        println!("{}", serde_json::to_string(&Answer { seconds, peak_mb, loss })?);
    }
    dist.shutdown()?;
    Ok(())
}

fn step(sharded: &Sharded<'_>, layers: &[Layer], data: &Tensor, rollouts: usize) -> Result<f64> {
    let rollout = Rollout::new(sharded);
    let (mut state, mut loss) = (data.shallow_clone(), Tensor::from(0f32));
    for _ in 0..rollouts {
        for layer in layers {
            state = layer.forward_replay(&rollout, &state)?;
        }
        state = &state / (state.detach().abs().mean(Kind::Float) + 1.0);
        loss += state.square().mean(Kind::Float);
    }
    rollout.backward(&loss)?;
    Ok(f64::try_from(&loss)?)
}
