//! An impl block must say which methods are blocks.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

#[replay_block]
impl World {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
