//! There is no type to hold the sibling.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

trait Dynamics {
    fn step(&self, x: &Tensor) -> Tensor;
}

#[replay_block]
impl<T: Send> Dynamics for T {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
