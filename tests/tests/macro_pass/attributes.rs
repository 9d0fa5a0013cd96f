//! Attributes of the method stay on the method, once; `carried.rs` has those that go to the sibling too.
#![deny(warnings)]

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

struct World;

impl World {
    /// Documented.
    #[inline]
    #[must_use = "a step has no other effect"]
    #[replay_block]
    #[expect(unused_variables)]
    fn step(&self, state: &Tensor, action: &Tensor) -> Tensor {
        state + 1.0
    }

    #[replay_block]
    #[deprecated = "use `step`"]
    fn old(&self, state: &Tensor) -> Tensor {
        state + 2.0
    }

    #[replay_block]
    #[cfg(any())]
    fn never(&self, state: &Tensor) -> NoSuchType {
        state + 2.0
    }
}

#[replay_block]
impl World {
    #[cfg(any())]
    #[replay_block]
    fn never_either(&self, state: &Tensor) -> NoSuchType {
        state + 2.0
    }

    #[replay_block]
    #[allow(clippy::unused_self)]
    fn other(&self, state: &Tensor, #[allow(unused_variables)] action: &Tensor) -> Tensor {
        state + 3.0
    }
}

#[test]
fn siblings_run() {
    let world = World;
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [
            world.step_replay(&rollout, &x, &x).unwrap(),
            #[expect(deprecated)]
            world.old_replay(&rollout, &x).unwrap(),
            world.other_replay(&rollout, &x, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [2.0, 3.0, 4.0]);
}
