//! A block returns nothing else.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn loss(&self, x: &Tensor) -> f64 {
        x.double_value(&[])
    }

    #[replay_block]
    fn both(&self, x: &Tensor) -> (Tensor, f64) {
        (x + 1.0, x.double_value(&[]))
    }
}

fn main() {}
