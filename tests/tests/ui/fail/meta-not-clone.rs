//! Data is copied for each run.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct Noise(f64);

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[meta] noise: Noise) -> Tensor {
        x + noise.0
    }
}

fn main() {}
