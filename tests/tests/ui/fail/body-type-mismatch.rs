//! A type error in the body is rustc's, at its own place.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> (Tensor, Tensor) {
        x + 1.0
    }
}

fn main() {}
