//! Activation checkpointing for [`tch`]: the exact gradient of a whole rollout in the memory of one block.

mod accumulator;
mod block;
mod context;
pub mod cuda;
mod error;
mod ffi;
mod input;
mod modes;
mod output;
#[doc(hidden)]
pub mod private;
mod registry;
mod replay;
mod report;
mod rollout;
mod saved;
mod state;
mod store;

pub use context::{ReplayContext, is_replaying};
pub use error::{Pass, ReplayError, TorchError};
pub use input::{ReplayInput, ReplayMeta};
pub use modes::AutocastGuard;
pub use output::{BoxError, ReplayOutput};
pub use registry::{BlockInfo, blocks};
pub use replay_macros::replay_block;
pub use report::{BlockReport, RolloutReport};
pub use rollout::{Rollout, RolloutBuilder};
pub use store::ParameterStore;
