//! An `Option` of something else may be a tensor by another name, until the types are known.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct Settings;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, settings: Option<&Settings>, rate: Option<f64>) -> Tensor {
        x + 1.0
    }
}

fn main() {}
