//! The attribute belongs on code.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[replay_block]
enum World {
    Flat,
}

fn main() {}
