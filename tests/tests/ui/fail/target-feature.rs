//! The sibling asks of its caller what the method asks.
#![allow(unused)]

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    #[target_feature(enable = "avx2")]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn run<'m>(world: &'m World, rollout: &Rollout<'m>, x: &Tensor) {
    world.step_replay(rollout, x);
}

fn main() {}
