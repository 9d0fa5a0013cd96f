//! `#[cfg]` on parameters, and inside `#[cfg_attr]`, reaches each element that the attribute makes of them.
#![allow(clippy::non_minimal_cfg)]

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

#[derive(Debug)]
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
        #[cfg_attr(all(), cfg(any()), meta)] absent_data: NoSuchData,
        #[cfg_attr(all(), meta, allow(unused_variables))] unused: f64,
        #[cfg_attr(all(), cfg(all()))] also: &Tensor,
    ) -> Tensor {
        (state + present) * data + also
    }
}

trait Rules {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor;
    fn no_block(&self, xs: &Tensor) -> Tensor;
    fn size(&self) -> i64;
}

impl World {
    /// Not ambiguous: the condition of that mark does not hold.
    fn no_block_replay(&self) -> i64 {
        self.size()
    }
}

/// A crate whose dependency is optional.
#[cfg_attr(all(), replay_block)]
impl Rules for World {
    #[cfg_attr(all(), inline, replay_block(name = "again"), cold)]
    fn forward_t(&self, xs: &Tensor, #[cfg_attr(all(), meta)] train: bool) -> Tensor {
        if train { xs + 1.0 } else { xs.shallow_clone() }
    }

    #[cfg_attr(any(), replay_block)]
    fn no_block(&self, xs: &Tensor) -> Tensor {
        xs + 2.0
    }

    fn size(&self) -> i64 {
        3
    }
}

#[test]
fn only_what_is_there_is_passed() {
    let world = World;
    let outputs = with_rollout!(|rollout| [
        world.step_replay(&rollout, &scalar(1.0), &scalar(2.0), 10.0, 0.0, &scalar(0.5)).unwrap(),
        world.again(&rollout, &scalar(1.0), true).unwrap(),
    ]);
    assert_eq!(outputs.map(|output| value(&output)), [30.5, 2.0]);
    assert_eq!((value(&world.no_block(&scalar(1.0))), world.no_block_replay()), (3.0, 3));
}

#[test]
fn only_what_is_there_is_named() {
    let blocks = replay_runtime::blocks();
    let block = blocks.iter().find(|block| block.module() == module_path!() && block.name() == "step");
    assert_eq!(block.unwrap().inputs(), ["state", "present", "also"]);
}
