//! The mark has no options.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[meta(clone)] frame: i64) -> Tensor {
        x + frame as f64
    }
}

fn main() {}
