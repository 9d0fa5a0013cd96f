//! Inputs have names.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, _: &Tensor, #[meta] (a, b): (f64, f64), ref x: Tensor) -> Tensor {
        x + a + b
    }
}

fn main() {}
