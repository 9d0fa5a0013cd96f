//! The attribute belongs on code.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[replay_block]
#[derive(Clone)]
struct World {
    by: f64,
}

impl World {
    fn by(&self) -> f64 {
        self.by
    }
}

fn main() {}
