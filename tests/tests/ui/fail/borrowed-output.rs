//! The replay computes its own output.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step<'a>(&self, x: &'a Tensor) -> &'a Tensor {
        x
    }

    #[replay_block]
    fn pair<'a>(&self, x: &'a Tensor) -> (Tensor, &'a Tensor) {
        (x + 1.0, x)
    }
}

fn main() {}
