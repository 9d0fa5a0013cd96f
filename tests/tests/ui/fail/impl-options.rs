//! The options of a method belong on it.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

#[replay_block(name = "again", context = scope, buffers)]
impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
