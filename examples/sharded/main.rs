//! A decoder whose parameters, gradients and optimizer state are cut over several processes.
//!
//! `cargo xtask sharded --world 4`, or under torchrun; by itself it is a world of one.

#![forbid(unsafe_code)]
#![expect(clippy::cast_precision_loss, reason = "bytes and processes are few")]

mod check;
mod model;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use replay_runtime::dist::{Dist, report_failure};
use replay_runtime::{Optimizer, Rollout, bench_support};
use serde::Serialize;
use tch::nn;
use tch::{Device, Tensor};

use model::{Decoder, Size, batch};

/// Trains a decoder over several processes.
#[derive(Debug, Parser)]
struct Options {
    /// Layers; each is whole only while it runs.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Width of a layer.
    #[arg(long, default_value_t = 128)]
    width: i64,
    /// Heads of its attention, which divide the width.
    #[arg(long, default_value_t = 4)]
    heads: i64,
    /// Different tokens.
    #[arg(long, default_value_t = 64)]
    tokens: i64,
    /// Tokens that a prediction sees at most.
    #[arg(long, default_value_t = 32)]
    length: i64,
    /// Sequences in a batch; each process has its own.
    #[arg(long, default_value_t = 8)]
    batch: i64,
    /// Training steps.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Rank 0 trains a second model at the end, alone and with the batches of all, and compares every bit.
    #[arg(long)]
    check: bool,
    /// A checkpoint to go on from, of however many processes.
    #[arg(long, conflicts_with = "check")]
    load: Option<PathBuf>,
    /// A folder to be made, for the checkpoint at the end.
    #[arg(long)]
    save: Option<PathBuf>,
    /// Rank 0 prints a record instead of lines.
    #[arg(long)]
    json: bool,
}

impl Options {
    fn size(&self) -> Size {
        let Self { layers, width, heads, tokens, length, .. } = *self;
        Size { layers, width, heads, tokens, length }
    }
}

/// What came out.
#[derive(Serialize)]
struct Outcome {
    world: usize,
    parameters: usize,
    /// The mean of all ranks, step by step.
    losses: Vec<f64>,
    /// Each rank's most bytes of tensors at once while it trained.
    peak_bytes: Vec<f64>,
    /// Bytes of parameters, gradients and the optimizer's two moments in one process.
    state_bytes: usize,
    /// Bytes of the largest layer's parameters and gradients.
    unit_bytes: usize,
    /// Whether losses and parameters are those of one process with the same batches.
    equal: Option<bool>,
}

fn main() -> ExitCode {
    // Before there is another thread.
    let counted = bench_support::count_live_bytes();
    let outcome = counted.map_err(Into::into).and_then(|_| run(&Options::parse()));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let _ = report_failure(&*error);
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    tch::set_num_threads(1);
    let dist = if std::env::var_os("RANK").is_some() { Dist::from_env()? } else { Dist::single() };
    let (size, world) = (options.size(), dist.world());
    tch::manual_seed(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let decoder = Decoder::new(&vs.root(), size);
    let counts: Vec<_> = vs.variables().into_iter().map(|(name, variable)| (name, variable.numel())).collect();
    let of_layer = counts.iter().filter(|(name, _)| name.starts_with("layers.0."));
    let unit = of_layer.map(|(_, count)| count).sum::<usize>();
    let parameters = counts.iter().map(|(_, count)| count).sum::<usize>();

    let mut sharded = decoder.shard(&dist, &vs)?;
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-3)?;
    let begin = match &options.load {
        Some(path) => usize::try_from(sharded.load_sharded(path, Some(&mut optimizer))?.step)?,
        None => 0,
    };
    bench_support::reset_live_peak();
    let mut losses = Vec::new();
    for step in begin..begin + options.steps {
        let own = batch(size, options.batch, seed(step, dist.rank(), world));
        let rollout = Rollout::new(&sharded);
        let loss = decoder.losses(&rollout, &own.unsqueeze(0))?.remove(0);
        rollout.backward(&loss)?;
        let norm = sharded.grad_norm()?;
        optimizer.step()?;
        sharded.zero_grad();
        let all = dist.all_gather(f64::try_from(&loss)?)?;
        losses.push(mean(&all));
        if dist.rank() == 0 && !options.json {
            println!("step {step:3}: loss {:.6}, norm of the gradient {norm:.4}", losses[step - begin]);
        }
    }
    if let Some(path) = &options.save {
        sharded.save_sharded(path, Some(&optimizer), u64::try_from(begin + options.steps)?)?;
    }
    let peak_bytes = dist.all_gather(bench_support::live_peak() as f64)?;
    let equal = (options.check && dist.rank() == 0).then(|| check::is_equal(&vs, &losses, options, world));
    let equal = equal.transpose()?;
    if dist.rank() == 0 {
        let (state_bytes, unit_bytes) = (16 * parameters, 8 * unit);
        let outcome = Outcome { world, parameters, losses, peak_bytes, state_bytes, unit_bytes, equal };
        if options.json {
            println!("{}", serde_json::to_string(&outcome)?);
        } else {
            report(&outcome);
        }
    }
    dist.shutdown()?;
    match equal {
        Some(false) => Err("one process with the same batches comes to something else".into()),
        _ => Ok(()),
    }
}

/// The number of a batch: no two ranks ever have the same.
fn seed(step: usize, rank: usize, world: usize) -> i64 {
    i64::try_from(step * world + rank).expect("not so many batches")
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn report(outcome: &Outcome) {
    let mb = |bytes: f64| bytes / 1e6;
    let Outcome { world, parameters, state_bytes, unit_bytes, .. } = *outcome;
    let share = state_bytes as f64 / world as f64 + unit_bytes as f64;
    println!("{parameters} parameters; with gradients and AdamW's moments {:.1} MB", mb(state_bytes as f64));
    println!("over {world} processes, with one layer whole: {:.1} MB each", mb(share));
    for (rank, peak) in outcome.peak_bytes.iter().enumerate() {
        println!("rank {rank}: {:.1} MB at the peak, what the batch takes included", mb(*peak));
    }
    match outcome.equal {
        Some(true) => {
            println!("losses and parameters are, to the last bit, those of one process with the same batches");
        }
        Some(false) => println!("one process with the same batches comes to other losses or parameters"),
        None => {}
    }
}

/// Bits of a tensor.
fn bits(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.detach().contiguous().view(-1);
    let mut bytes = vec![0; flat.numel() * flat.kind().elt_size_in_bytes()];
    flat.copy_data_u8(&mut bytes, flat.numel());
    bytes
}
