//! A test has no inputs.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[replay_block]
#[test]
fn step() {}

fn main() {}
