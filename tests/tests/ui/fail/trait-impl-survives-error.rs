//! Impl and sibling stay: their callers see no error of their own.
#![allow(unused)]

use replay_runtime::{ReplayError, Rollout, replay_block};
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

fn calls<'m>(net: &'m Net, rollout: &Rollout<'m>, xs: &Tensor) -> Result<Tensor, ReplayError> {
    let xs = call(net, xs);
    net.forward_t_replay(rollout, &xs, true)
}

fn main() {}
