//! The forms of an optional input.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, mask: &Option<Tensor>) -> Tensor {
        x + 1.0
    }
}

fn main() {}
