//! A block belongs to one rollout.
#![allow(unused)]

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step<'m>(&'m self, rollout: &Rollout<'m>, other: &Rollout<'m>, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
