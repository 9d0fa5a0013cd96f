//! One mark per parameter.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[meta] #[meta] frame: i64) -> Tensor {
        x + frame as f64
    }
}

fn main() {}
