//! The model must be made before the rollout.
use replay_runtime::{Rollout, replay_block};
use tch::nn::VarStore;
use tch::{Device, Tensor};

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {
    let vs = VarStore::new(Device::Cpu);
    let rollout = Rollout::new(&vs);
    let world = World;
    let _ = world.step_replay(&rollout, &Tensor::from(1.0));
}
