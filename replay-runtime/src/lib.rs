//! Activation checkpointing for [`tch`]: the exact gradient of a whole rollout in the memory of one block.
//!
//! A *replay block* is a piece of a model, usually one step of it, of which the forward pass keeps only the inputs.
//! [`Rollout::backward`] runs the block again, differentiates it, and adds the gradients of all blocks up in the
//! variables' own `.grad`.
//!
//! ```no_run
//! use replay_runtime::{ReplayError, Rollout, replay_block};
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! struct Cell(nn::Linear);
//!
//! impl Cell {
//!     #[replay_block]
//!     fn step(&self, state: &Tensor, input: &Tensor) -> Tensor {
//!         (self.0.forward(state) + input).tanh()
//!     }
//! }
//!
//! # fn main() -> Result<(), ReplayError> {
//! let vs = nn::VarStore::new(Device::Cpu);
//! let cell = Cell(nn::linear(vs.root(), 64, 64, Default::default()));
//! let inputs = Tensor::randn([100, 32, 64], (Kind::Float, Device::Cpu));
//!
//! let rollout = Rollout::new(&vs);
//! let mut state = Tensor::zeros([32, 64], (Kind::Float, Device::Cpu));
//! for i in 0..100 {
//!     state = cell.step_replay(&rollout, &state, &inputs.get(i))?;
//! }
//! rollout.backward(&state.square().mean(Kind::Float))?;
//! # Ok(())
//! # }
//! ```
//!
//! # The order of things
//!
//! The model is made before the rollout, because blocks borrow it for as long as the rollout lives; otherwise the
//! compiler says that the model "does not live long enough" (E0597). The rollout borrows the
//! [`VarStore`](tch::nn::VarStore), so that `freeze` and `load` cannot happen in between. `backward` ends it; the
//! optimizer's step comes after.
//!
//! # What a block must be
//!
//! Its body runs twice (blocks inside blocks more often) and must do the same each time: read its inputs, `#[meta]` data,
//! trainable variables, and state that a [`ReplayContext`] restores; update non-trainable variables only where it is
//! marked `buffers`; draw random numbers from LibTorch's default generators only; change nothing else that it reads; hand
//! out what it computes as outputs only; and take gradients of its own with `Tensor::run_backward`, since a `backward`
//! that reaches variables adds to their `.grad` each time it runs. What of this can be noticed is an error, in the
//! compiler or as a [`ReplayError`].
//! [`is_replaying`] tells code inside a block which run it is in.
//!
//! # Exactness
//!
//! On CPU with one thread, gradients have the bits of autograd taken block by block, and those of plain autograd over
//! the whole graph where the sums associate alike; the README says when.

mod accumulator;
mod advance;
#[doc(hidden)]
pub mod bench_support;
mod block;
mod buffers;
mod chain;
mod context;
pub mod cuda;
pub mod dist;
mod error;
mod ffi;
mod input;
mod keep;
mod leaves;
mod link;
mod modes;
mod optim;
mod options;
mod output;
#[doc(hidden)]
pub mod private;
mod recorded;
mod registry;
mod replay;
mod report;
mod rng;
mod rollout;
mod saved;
mod schedule;
mod sequential;
mod sharded;
mod state;
mod store;
mod torch_error;
mod variables;
mod windows;

pub use chain::Chain;
pub use context::{ReplayContext, is_replaying};
pub use error::{Pass, ReplayError};
pub use input::{ReplayInput, ReplayMeta};
pub use modes::AutocastGuard;
pub use optim::{Algorithm, Optimizer};
pub use options::{BlockOptions, Check, EarlyStop, Keep};
pub use output::{BoxError, ReplayOutput};
pub use registry::{BlockInfo, blocks};
pub use replay_macros::replay_block;
pub use report::{BlockReport, RolloutReport};
pub use rollout::{Rollout, RolloutBuilder};
pub use sharded::{CheckpointError, Loaded, MemoryReport, ShardError, Sharded, ShardedBuilder};
pub use store::ParameterStore;
pub use torch_error::TorchError;
