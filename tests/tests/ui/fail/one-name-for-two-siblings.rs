//! Two traits may share a method name, one type cannot: `name = ".."` tells their siblings apart.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

trait First {
    fn step(&self, x: &Tensor) -> Tensor;
}

trait Second {
    fn step(&self, x: &Tensor) -> Tensor;
}

struct Net;

#[replay_block]
impl First for Net {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

#[replay_block]
impl Second for Net {
    fn step(&self, x: &Tensor) -> Tensor {
        x + 2.0
    }
}

fn main() {}
