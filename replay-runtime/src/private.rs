//! What generated code names. Not part of the public interface: it changes without notice.

pub use inventory;

use tch::Tensor;

pub use crate::context::NoContext;
pub use crate::input::{FromLeaf, assert_meta, input, next_input};
pub use crate::registry::{Registration, block_info, registration};

use crate::state::Label;
use crate::store::UnitKey;
use crate::{BlockInfo, BlockOptions, ReplayContext, ReplayError, ReplayOutput, Rollout};

/// The object that a marked method belongs to.
pub fn unit<T: ?Sized>(object: &T) -> Option<UnitKey> {
    Some(UnitKey::of(object))
}

/// A function belongs to none.
pub const NO_UNIT: Option<UnitKey> = None;

/// Runs a block of `rollout`.
///
/// # Errors
/// See [`Rollout::block`].
pub fn run<'m, R, C, F>(
    rollout: &Rollout<'m>,
    block: &'static BlockInfo,
    unit: Option<UnitKey>,
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
    let options = BlockOptions { unit, ..options };
    let names = block.inputs().iter().map(|&name| name.to_owned());
    rollout.call(Label::new(options, names), inputs, context, body)
}
