//! One `Result`, outside.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Result<Result<Tensor, String>, String> {
        Ok(Ok(x + 1.0))
    }

    #[replay_block]
    fn inside(&self, x: &Tensor) -> (Tensor, Result<Tensor, String>) {
        (x + 1.0, Ok(x + 2.0))
    }
}

fn main() {}
