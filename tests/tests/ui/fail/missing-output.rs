//! A block returns tensors.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) {
        let _ = x;
    }

    #[replay_block]
    fn unit(&self, x: &Tensor) -> () {
        let _ = x;
    }
}

fn main() {}
