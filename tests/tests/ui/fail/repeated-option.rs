//! Each option once.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block(name = "a", name = "b", buffers, buffers)]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
