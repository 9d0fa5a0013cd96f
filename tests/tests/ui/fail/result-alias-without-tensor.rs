//! A `Result` without arguments is an alias of the user, and the types tell.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> std::fmt::Result {
        Ok(())
    }
}

fn main() {}
