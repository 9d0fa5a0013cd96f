//! An input that is changed in place.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &mut Tensor) -> Tensor {
        x.shallow_clone()
    }
}

fn main() {}
