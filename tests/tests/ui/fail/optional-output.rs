//! An output is always there.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> (Tensor, Option<Tensor>) {
        (x + 1.0, None)
    }
}

fn main() {}
