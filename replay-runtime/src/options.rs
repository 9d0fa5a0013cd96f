//! Choices that the builder and [`Rollout::block_with`](crate::Rollout::block_with) take.

use crate::store::UnitKey;

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

/// Which blocks' graphs a rollout keeps until `backward`, so that these blocks need no replay.
///
/// Backward begins with the newest block, so the graphs that are kept are gone before the first replay needs room. The newest
/// ones stay, the oldest give way. Blocks that run blocks inside are always replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// None: one block's graph at a time, as little memory as can be.
    #[default]
    None,
    /// Those of the last so many blocks. `Last(1)` saves a replay and takes no more memory at the peak, unless what comes
    /// after the last block (a large head, say) needs much itself.
    Last(usize),
    /// Those whose saved tensors fit into so many bytes together. Each storage counts once per graph; inputs
    /// and variables, which live anyway unless they are offloaded, do not count. While a block runs its own graph comes on top.
    Bytes(u64),
}

/// Which replays end as soon as all that the block's gradient needs has been computed again.
///
/// Such a block's forward records its graph without the tensors in it; the replay brings them again, and what comes after
/// the last one need not run: in `x + down(gelu(up(x)))` that is the whole product with `down`, a third of
/// a transformer block. The way out of a body is a panic that the library starts and catches, so a body that is stopped
/// unwinds: destructors run and see [`std::thread::panicking`], a `MutexGuard` that is alive then poisons its mutex. Hence
/// it is a block's own choice. Where panics abort, such bodies run to their ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EarlyStop {
    /// None: each replay builds its block's graph anew and runs to the end.
    Off,
    /// Those of blocks that are marked `early_stop`.
    #[default]
    Marked,
    /// Those too; and the other blocks' replays bring the tensors of a recorded graph and run to the end. For comparison: it
    /// saves no time.
    Always,
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
    pub(crate) name: String,
    pub(crate) buffers: bool,
    pub(crate) early_stop: bool,
    pub(crate) unit: Option<UnitKey>,
}

impl BlockOptions {
    /// A block of that name, for messages and reports.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), buffers: false, early_stop: false, unit: None }
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

    /// Whether its replay ends, by unwinding, as soon as all that the gradient needs has been computed again; see
    /// [`EarlyStop`]. Default: no.
    ///
    /// It takes effect where the body runs no blocks inside, opens no [`ReplayContext`](crate::ReplayContext), takes no gradient of
    /// its own, captures no trainable tensor that no store knows, and the rollout does not compare values
    /// ([`Check::Values`], or [`serialize_rng(false)`](crate::RolloutBuilder::serialize_rng) beside other threads); else the replay
    /// runs to the end. A body that takes a gradient of its own begins again, once in a rollout, in its first forward. A
    /// tensor that a body leaves aside cannot be differentiated. What is computed only where
    /// [`is_replaying`](crate::is_replaying) says so, or only where it does not, must not need a gradient: use
    /// [`tch::no_grad`] or [`detach`](tch::Tensor::detach) for it. A panic hook that is set between a rollout's forward and its
    /// backward may hear of the ends of bodies.
    pub fn early_stop(mut self, early_stop: bool) -> Self {
        self.early_stop = early_stop;
        self
    }

    /// The object whose parameters the block has: it is a [unit](crate::ShardedBuilder::unit) of the rollout's
    /// [`Sharded`](crate::Sharded) store. Other stores take no notice of it. Marked methods name theirs themselves.
    pub fn unit<T: ?Sized>(mut self, object: &T) -> Self {
        self.unit = Some(UnitKey::of(object));
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The same choices for a block of another name.
    pub(crate) fn renamed(&self, name: String) -> Self {
        Self { name, ..self.clone() }
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
