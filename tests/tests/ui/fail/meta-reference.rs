//! Data is owned.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[meta] name: &str, #[meta] data: Option<&'static [i64]>) -> Tensor {
        x + 1.0
    }
}

fn main() {}
