//! Guarantee *sharded*, where blocks compute on a GPU and pieces stay on the CPU. All of it needs a GPU, which ranks share, and is
//! compiled without one.

use std::collections::BTreeMap;

use replay_runtime::dist::Dist;
use replay_runtime::{Optimizer, Rollout, Sharded, cuda, replay_block};
use replay_tests::randn;
use replay_tests::ranks::each_rank;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

struct Layer {
    linear: nn::Linear,
    mean: Tensor,
}

impl Layer {
    #[replay_block(buffers, early_stop)]
    fn forward(&self, x: &Tensor) -> Tensor {
        let h = self.linear.forward(x).tanh();
        tch::no_grad(|| self.mean.shallow_clone().copy_(&h.mean_dim(0, false, h.kind())));
        x + h
    }
}

/// Losses of three steps, and the parameters after them.
fn train(dist: &Dist, device: Device, overlap: bool) -> (Vec<f64>, BTreeMap<String, Tensor>) {
    tch::manual_seed(7);
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = |i: usize| {
        let path = vs.root() / "layers" / i;
        Layer {
            linear: nn::linear(&path, 16, 16, nn::LinearConfig::default()),
            mean: path.zeros_no_train("mean", &[16]),
        }
    };
    let layers: Vec<_> = (0..3).map(layer).collect();
    let head = vs.root().var("head", &[16, 4], nn::Init::Randn { mean: 0.0, stdev: 0.3 });
    let mut builder = Sharded::builder(dist, &vs).compute_on(device).overlap(overlap);
    for (i, layer) in layers.iter().enumerate() {
        builder = builder.unit(&format!("layers.{i}"), layer);
    }
    let sharded = builder.build().unwrap();
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    let mut losses = Vec::new();
    for step in 0..3 {
        let rollout = Rollout::new(&sharded);
        let mut x = randn(10 * step + i64::try_from(dist.rank()).unwrap(), &[8, 16], Kind::Float).to_device(device);
        for layer in &layers {
            x = layer.forward_replay(&rollout, &x).unwrap();
        }
        let loss = x.matmul(&head).square().mean(Kind::Float);
        rollout.backward(&loss).unwrap();
        assert!(vs.trainable_variables().iter().all(|piece| piece.grad().device() == Device::Cpu));
        sharded.clip_grad_norm(1.0).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad();
        losses.push(f64::try_from(loss).unwrap());
    }
    assert!(vs.trainable_variables().iter().all(|piece| piece.device() == Device::Cpu));
    (losses, vs.variables().into_iter().map(|(name, tensor)| (name, tensor.to_device(Device::Cpu))).collect())
}

#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn training_on_a_gpu_is_that_on_the_cpu() {
    each_rank("training_on_a_gpu_is_that_on_the_cpu", &[1, 2], |dist| {
        cuda::load().expect("CUDA loads");
        let (losses, variables) = train(&dist, Device::Cpu, false);
        for overlap in [false, true] {
            let (found_losses, found) = train(&dist, Device::Cuda(0), overlap);
            assert!(losses.iter().zip(&found_losses).all(|(a, b)| (a - b).abs() < 1e-4), "{losses:?} {found_losses:?}");
            for (name, variable) in &variables {
                assert!(found[name].allclose(variable, 1e-3, 1e-3, false), "{name}");
            }
        }
        dist.shutdown().unwrap();
    });
}
