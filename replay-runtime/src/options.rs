//! Choices that the builder and [`Rollout::block_with`](crate::Rollout::block_with) take.

/// What of a replay's outputs is compared with the forward's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Check {
    /// Number, shape, kind, device and `requires_grad`.
    #[default]
    Metadata,
    /// The values too, bit for bit. Finds a block that reads something which has changed unseen; costs a copy of each
    /// output until its block is replayed, and the comparison.
    Values,
}

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
    /// batch normalisation. Default: no, and it is an error that names the variable. A block that runs such a block needs
    /// the option too.
    ///
    /// They are updated once, by the forward, exactly as without replaying: a replay starts from the values of before
    /// its forward, and after it the present values come back. A rollout keeps a copy of all non-trainable variables,
    /// and another one of those that a block changes for each such block; all are compared by value around each block.
    pub fn buffers(mut self, buffers: bool) -> Self {
        self.buffers = buffers;
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The same choices for a block of another name.
    pub(crate) fn renamed(&self, name: String) -> Self {
        Self { name, ..self.clone() }
    }

    pub(crate) fn into_parts(self) -> (String, bool) {
        (self.name, self.buffers)
    }
}

impl From<&str> for BlockOptions {
    /// A block of that name, without further choices.
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl From<String> for BlockOptions {
    /// A block of that name, without further choices.
    fn from(name: String) -> Self {
        Self::new(name)
    }
}
