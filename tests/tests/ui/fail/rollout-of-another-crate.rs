//! A type of the user that is called `Rollout`.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

#[derive(Clone)]
struct Rollout;

struct Agent;

impl Agent {
    #[replay_block]
    fn owned(&self, x: &Tensor, rollout: Rollout) -> Tensor {
        x + 1.0
    }

    #[replay_block]
    fn borrowed(&self, x: &Tensor, rollout: &Rollout) -> Tensor {
        x + 1.0
    }
}

fn main() {}
