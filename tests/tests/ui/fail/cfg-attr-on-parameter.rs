//! Attribute macros see `cfg_attr` unresolved.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[cfg_attr(all(), meta)] frame: i64) -> Tensor {
        x + frame as f64
    }
}

fn main() {}
