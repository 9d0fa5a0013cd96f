//! The attribute belongs on the impl.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

trait World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor;
}

fn main() {}
