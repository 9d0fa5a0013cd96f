//! Generated code passes where the user forbids `unsafe`.
#![forbid(unsafe_code, non_snake_case)]
#![allow(unreachable_pub)]

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;

pub struct World;

impl World {
    #[replay_block]
    pub fn step<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor, #[meta] by: f64) -> Tensor {
        self.inner_replay(rollout, x).unwrap() * by
    }

    #[replay_block]
    fn inner(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

#[replay_block]
impl tch::nn::Module for World {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + 2.0
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

#[test]
fn runs() {
    let world = World;
    let output = with_rollout!(|rollout| {
        let x = world.step_replay(&rollout, &crate::scalar(1.0), 2.0).unwrap();
        world.forward_replay(&rollout, &x).unwrap()
    });
    assert!((crate::value(&output) - 6.0).abs() < f64::EPSILON);
}
