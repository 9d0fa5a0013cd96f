//! Choices for one block that is made of a closure; the attribute's options are the same.

use crate::state::Label;

/// What [`Rollout::block_with`](crate::Rollout::block_with) needs to know of a block.
///
/// ```no_run
/// # use replay_runtime::{BlockOptions, ReplayError, Rollout};
/// # use tch::{Tensor, nn, nn::ModuleT};
/// # fn step(vs: &nn::VarStore, norm: &nn::BatchNorm, x: &Tensor) -> Result<(), ReplayError> {
/// # let rollout = Rollout::new(vs);
/// let options = BlockOptions::new("norm").buffers(true);
/// let y = rollout.block_with(options, &[("x", x)], |_, inputs| inputs[0].apply_t(norm, true))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct BlockOptions {
    name: String,
    buffers: bool,
}

impl BlockOptions {
    /// A block of that name, for messages and reports.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), buffers: false }
    }

    /// Whether the block may update non-trainable variables of the rollout's stores, such as the running statistics of
    /// batch normalisation. Default: no, and it is an error that names the variable.
    ///
    /// They are updated once, by the forward, exactly as without replaying: a replay starts from the values of before
    /// its forward, and after it the present values come back. Each block keeps a copy of the buffers that it changes.
    pub fn buffers(mut self, buffers: bool) -> Self {
        self.buffers = buffers;
        self
    }

    pub(crate) fn label(self, inputs: impl IntoIterator<Item = String>) -> Label {
        Label { block: self.name.into(), inputs: inputs.into_iter().collect(), buffers: self.buffers }
    }
}
