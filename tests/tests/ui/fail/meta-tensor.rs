//! A tensor is an input.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[meta] y: &Tensor, #[meta] z: Vec<Tensor>) -> Tensor {
        x + y
    }
}

fn main() {}
