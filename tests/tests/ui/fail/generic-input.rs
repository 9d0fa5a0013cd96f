//! A tensor is passed as a tensor, not as something that can be turned into one.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

use std::borrow::Borrow;

#[replay_block]
fn by_trait(x: &Tensor, y: impl Borrow<Tensor>) -> Tensor {
    x + y.borrow()
}

#[replay_block]
fn by_parameter<T: AsRef<Tensor>>(x: &Tensor, y: T) -> Tensor {
    x + y.as_ref()
}

fn main() {}
