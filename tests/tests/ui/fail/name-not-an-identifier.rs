//! The name becomes a method.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block(name = "step again")]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }

    #[replay_block(name = "fn")]
    fn other(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
