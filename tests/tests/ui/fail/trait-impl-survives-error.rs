//! The impl itself stays, and the trait is implemented.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[derive(Debug)]
struct Net;

#[replay_block]
impl tch::nn::ModuleT for Net {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        if train { xs + 1.0 } else { xs + 2.0 }
    }
}

fn call(net: &dyn tch::nn::ModuleT, xs: &Tensor) -> Tensor {
    net.forward_t(xs, true)
}

fn calls(net: &Net, xs: &Tensor) -> Tensor {
    call(net, xs)
}

fn main() {}
