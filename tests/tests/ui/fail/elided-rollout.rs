//! A nested block names the lifetime.
#![allow(unused)]

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn elided(&self, rollout: &Rollout, x: &Tensor) -> Tensor {
        x + 1.0
    }

    #[replay_block]
    fn anonymous(&self, rollout: &Rollout<'_>, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
