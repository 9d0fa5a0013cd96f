//! One mark each.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

#[replay_block]
#[replay_block]
impl World {
    #[replay_block]
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }

    #[replay_block = "again"]
    fn other(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
