//! The rollout borrows the parameters.
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
    let mut vs = VarStore::new(Device::Cpu);
    let world = World;
    let rollout = Rollout::new(&vs);
    let _ = world.step_replay(&rollout, &Tensor::from(1.0));
    vs.freeze();
    let _ = world.step_replay(&rollout, &Tensor::from(1.0));
}
