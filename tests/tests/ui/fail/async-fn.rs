//! The backward pass cannot await.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    async fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
