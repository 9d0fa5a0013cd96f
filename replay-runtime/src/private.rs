//! What generated code names. Not part of the public interface: it changes without notice.

pub use inventory;

use tch::Tensor;

pub use crate::context::NoContext;
pub use crate::input::{FromLeaf, assert_meta, input, next_input};
pub use crate::registry::{Registration, block_info, registration};

use crate::state::Label;
use crate::{BlockInfo, BlockOptions, ReplayContext, ReplayError, ReplayOutput, Rollout};

/// Runs a block of `rollout`.
///
/// # Errors
/// See [`Rollout::block`].
pub fn run<'m, R, C, F>(
    rollout: &Rollout<'m>,
    block: &'static BlockInfo,
    inputs: &[Option<&Tensor>],
    context: C,
    body: F,
) -> Result<R::Value, ReplayError>
where
    R: ReplayOutput,
    C: ReplayContext + 'm,
    F: Fn(&Rollout<'m>, &[Option<Tensor>]) -> R + 'm,
{
    let options = BlockOptions::new(block.name()).buffers(block.updates_buffers()).early_stop(block.stops_early());
    let names = block.inputs().iter().map(|&name| name.to_owned());
    rollout.call(Label::new(options, names), inputs, context, body)
}
