//! The error must turn into a boxed one.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct Failure;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Result<Tensor, Failure> {
        Ok(x + 1.0)
    }
}

fn main() {}
