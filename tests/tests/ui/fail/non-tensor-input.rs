//! Data is marked.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, frame: i64, name: &str) -> Tensor {
        x + frame as f64
    }
}

fn main() {}
