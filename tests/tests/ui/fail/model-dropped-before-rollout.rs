//! The rollout keeps the model borrowed.
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
    let world = World;
    let rollout = Rollout::new(&vs);
    let _ = world.step_replay(&rollout, &Tensor::from(1.0));
    drop(world);
    let _ = Rollout::backward(rollout, &Tensor::from(1.0));
}
