//! An input lives for one call.
#![allow(unused)]

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step<'m>(&'m self, rollout: &Rollout<'m>, x: &'m Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
