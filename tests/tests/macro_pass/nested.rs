//! Blocks that run blocks.
#![allow(unused_qualifications)]

use replay_runtime::{ReplayError, Rollout, replay_block};
use tch::Tensor;

use crate::{scalar, value};

struct World {
    by: f64,
}

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x * self.by
    }

    #[replay_block]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<(Tensor, Tensor), ReplayError> {
        Ok((self.step_replay(rollout, x)?, self.step_replay(rollout, x)?))
    }

    #[replay_block]
    fn outermost<'m, const N: usize>(
        &'m self,
        x: &Tensor,
        #[meta] shift: f64,
        run: &replay_runtime::Rollout<'m>,
    ) -> Result<Tensor, ReplayError> {
        let mut x = x + shift;
        for _ in 0..N {
            x = self.outer_replay(run, &x)?.0;
        }
        Ok(x)
    }
}

#[replay_block]
fn free<'m>(rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
    double_replay(rollout, x)
}

#[replay_block]
fn double(x: &Tensor) -> Tensor {
    x * 2.0
}

#[test]
fn blocks_run_in_blocks() {
    let world = World { by: 2.0 };
    let outputs = with_rollout!(|rollout| [
        world.outermost_replay::<3>(&rollout, &scalar(1.0), 1.0).unwrap(),
        free_replay(&rollout, &scalar(1.0)).unwrap(),
    ]);
    assert_eq!(outputs.map(|output| value(&output)), [16.0, 2.0]);
}

#[test]
fn the_registry_says_that_they_nest() {
    let blocks = replay_runtime::blocks();
    let nested = |name| blocks.iter().any(|it| it.module().ends_with("nested") && it.name() == name && it.nested());
    assert!(nested("outer") && nested("outermost") && nested("free"));
    assert!(!nested("step"));
}
