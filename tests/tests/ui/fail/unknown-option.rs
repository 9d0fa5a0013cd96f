//! The options are listed.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block(nam = "again", inputs)]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
