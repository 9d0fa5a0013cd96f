//! The attribute belongs on the impl.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[replay_block]
trait World {
    fn step(&self, x: &Tensor) -> Tensor;
}

fn main() {}
