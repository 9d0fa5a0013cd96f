//! Method and sibling stay: their callers see no error of their own.
#![allow(unused)]

use replay_runtime::{ReplayError, Rollout, replay_block};
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, frame: i64) -> Tensor {
        x + frame as f64
    }
}

fn call<'m>(world: &'m World, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
    let _ = world.step(x, 3);
    world.step_replay(rollout, x, 3)
}

fn main() {}
