//! A sibling that nobody calls is said to be dead.
#![deny(dead_code)]

use replay_runtime::replay_block;
use tch::Tensor;

pub struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }

    pub fn call(&self, x: &Tensor) -> Tensor {
        self.step(x)
    }
}

fn main() {
    let _ = World.call(&Tensor::from(1.0));
}
