//! Outputs are a flat tuple.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> (Tensor, (Tensor, Tensor)) {
        (x + 1.0, (x + 2.0, x + 3.0))
    }
}

fn main() {}
