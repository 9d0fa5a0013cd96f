//! An input that the body does not use is said to be unused.
#![deny(unused_variables)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, action: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
