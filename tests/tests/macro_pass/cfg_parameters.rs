//! `#[cfg]` on parameters reaches each element that the attribute makes of them.
#![allow(clippy::non_minimal_cfg)]

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

struct World;

impl World {
    #[replay_block]
    fn step(
        &self,
        state: &Tensor,
        #[cfg(any())] absent: &NoSuchTensor,
        #[cfg(all())] present: &Tensor,
        #[cfg(any())]
        #[meta]
        no_data: NoSuchData,
        #[cfg(all())]
        #[meta]
        data: f64,
    ) -> Tensor {
        (state + present) * data
    }
}

#[test]
fn only_what_is_there_is_passed() {
    let world = World;
    let output = with_rollout!(|rollout| world.step_replay(&rollout, &scalar(1.0), &scalar(2.0), 10.0).unwrap());
    assert!((value(&output) - 30.0).abs() < f64::EPSILON);
}

#[test]
fn only_what_is_there_is_named() {
    let blocks = replay_runtime::blocks();
    let block = blocks.iter().find(|block| block.module().ends_with("cfg_parameters")).unwrap();
    assert_eq!(block.inputs(), ["state", "present"]);
}
