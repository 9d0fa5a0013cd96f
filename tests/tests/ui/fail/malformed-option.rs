//! Each option shows how it is written.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block(name = again, context, crate = "replay", buffers = true)]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
