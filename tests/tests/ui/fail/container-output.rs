//! Outputs are a flat tuple.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn list(&self, x: &Tensor) -> Vec<Tensor> {
        vec![x + 1.0]
    }

    #[replay_block]
    fn array(&self, x: &Tensor) -> (Tensor, [Tensor; 1]) {
        (x + 1.0, [x + 1.0])
    }
}

fn main() {}
