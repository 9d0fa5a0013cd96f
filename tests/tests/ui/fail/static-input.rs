//! A leaf lives for one call.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &'static Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
