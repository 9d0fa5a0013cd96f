//! The method itself stays, and its callers compile.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, frame: i64) -> Tensor {
        x + frame as f64
    }
}

fn call(world: &World, x: &Tensor) -> Tensor {
    world.step(x, 3)
}

fn main() {}
