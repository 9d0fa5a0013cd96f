//! A trait impl cannot hold the sibling: the attribute goes on the impl.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[derive(Debug)]
struct Net;

impl tch::nn::Module for Net {
    #[replay_block]
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + 1.0
    }
}

fn main() {}
