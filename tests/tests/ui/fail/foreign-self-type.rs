//! A sibling needs a type of this crate: an inherent impl is the only place for it.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

trait Step {
    fn step(&self, x: &Tensor) -> Tensor;
}

struct Net;

#[replay_block]
impl Step for Box<Net> {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

#[replay_block]
impl Step for &Net {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

#[replay_block]
impl Step for (Net, Net) {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

#[replay_block]
impl Step for f64 {
    fn step(&self, x: &Tensor) -> Tensor {
        x + *self
    }
}

fn main() {}
