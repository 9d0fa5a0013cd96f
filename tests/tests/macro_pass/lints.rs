//! No lint may fire in generated code: everything that could is denied here, and the user's own lines are clean.
#![deny(
    warnings,
    missing_docs,
    unreachable_pub,
    unused_lifetimes,
    unused_qualifications,
    single_use_lifetimes,
    elided_lifetimes_in_paths,
    explicit_outlives_requirements,
    let_underscore_drop,
    trivial_casts,
    trivial_numeric_casts,
    unit_bindings,
    unused_results,
    variant_size_differences,
    non_local_definitions,
    clippy::all,
    clippy::pedantic,
    clippy::nursery,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::absolute_paths,
    clippy::items_after_statements,
    clippy::missing_docs_in_private_items,
    clippy::shadow_reuse,
    clippy::shadow_same,
    clippy::shadow_unrelated,
    clippy::implicit_return,
    clippy::question_mark_used,
    clippy::min_ident_chars,
    clippy::pattern_type_mismatch,
    clippy::ref_patterns,
    clippy::clone_on_ref_ptr,
    clippy::let_underscore_untyped,
    clippy::unwrap_used
)]
#![allow(
    clippy::implicit_return,
    clippy::question_mark_used,
    clippy::absolute_paths,
    clippy::redundant_pub_crate,
    reason = "the style of these tests"
)]

use replay_runtime::{ReplayError, Rollout, replay_block};
use tch::Tensor;

/// A model.
#[derive(Debug)]
pub(crate) struct World {
    /// A number.
    by: f64,
}

impl World {
    /// One step.
    #[replay_block]
    pub(crate) fn step(&self, state: &Tensor, #[meta] frame: f64) -> Tensor {
        state * self.by + frame
    }

    /// An owned input that the body gives on, and one that it does not use.
    #[replay_block]
    pub(crate) fn owned(&self, state: Tensor, _action: Option<&Tensor>) -> (Tensor, Tensor) {
        let next = &state * self.by;
        (next, state)
    }

    /// A block of blocks.
    ///
    /// # Errors
    ///
    /// Where a block fails.
    #[replay_block]
    pub(crate) fn both<'m>(&'m self, rollout: &Rollout<'m>, state: &Tensor) -> Result<Tensor, ReplayError> {
        self.step_replay(rollout, state, 1.0)
    }
}

#[replay_block]
impl tch::nn::Module for World {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs * self.by
    }
}

/// A function.
#[replay_block]
pub(crate) fn free(state: &Tensor) -> Tensor {
    state * 2.0
}

/// Uses every sibling, since one that nobody calls is rightly said to be dead.
fn run() -> Result<f64, ReplayError> {
    let world = World { by: 2.0 };
    with_rollout!(|rollout| {
        let first = world.step_replay(&rollout, &crate::scalar(1.0), 1.0)?;
        let (second, _) = world.owned_replay(&rollout, first, None)?;
        let third = world.both_replay(&rollout, &second)?;
        let last = world.forward_replay(&rollout, &third)?;
        Ok(crate::value(&free_replay(&rollout, &last)?))
    })
}

#[test]
fn siblings_run() {
    assert!(run().is_ok_and(|output| (output - 52.0).abs() < f64::EPSILON));
}
