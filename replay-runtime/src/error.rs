//! Everything that can go wrong, one variant each. `Display` is one or two lines that name the block and the
//! input and say what to do; LibTorch's own long text stays behind `source()`.

use std::error::Error;
use std::fmt;

use crate::dist::DistError;
use crate::ffi::ShimError;
use crate::output::BoxError;
use crate::torch_error::TorchError;

/// A failure of a replay block or of the backward pass of a rollout.
///
/// Gradients, random number generators, buffers and thread modes are what they were before the call that failed: gradients
/// unless [`restore_gradients(false)`](crate::RolloutBuilder::restore_gradients) was chosen; generators and buffers of a
/// block that is a plain call, as under `no_grad`, are as its body left them.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The block's body returned an error; it is the source.
    #[error("replay block `{block}` returned an error in its {pass}: {}", brief(.source))]
    Block {
        /// The block.
        block: String,
        /// The pass in which the body ran.
        pass: Pass,
        /// The body's error.
        source: BoxError,
    },

    /// The block's [`ReplayContext`](crate::ReplayContext) returned an error; it is the source.
    #[error("the context of replay block `{block}` could not be entered in its {pass}: {}", brief(.source))]
    Context {
        /// The block.
        block: String,
        /// The pass for which it was entered.
        pass: Pass,
        /// The context's error.
        source: BoxError,
    },

    /// A block was called without any tensor.
    #[error("replay block `{block}` was given no tensor\nit needs at least one input: a replay starts from its inputs")]
    NoInput {
        /// The block.
        block: String,
    },

    /// An input is an undefined tensor.
    #[error(
        "input `{input}` of replay block `{block}` is an undefined tensor\npass a tensor with values, or make the parameter an `Option`"
    )]
    UndefinedInput {
        /// The block.
        block: String,
        /// The input.
        input: String,
    },

    /// An output is an undefined tensor.
    #[error("output {output} of replay block `{block}` is an undefined tensor\nreturn only tensors with values")]
    UndefinedOutput {
        /// The block.
        block: String,
        /// The position of the output, from 0.
        output: usize,
    },

    /// [`Rollout::sequential`](crate::Rollout::sequential) was given no layers, or a number of segments into which
    /// they cannot be cut.
    #[error(
        "the layers of `{block}`, {layers} in number, cannot be run in {segments} segments\nask for at least one segment, and for at most as many as there are layers"
    )]
    Segments {
        /// The name that the segments were to have.
        block: String,
        /// How many segments were asked for.
        segments: usize,
        /// How many layers there are.
        layers: usize,
    },

    /// A chain of no steps, which has no states to hand out.
    #[error("chain `{block}` has no steps\nuse it for one step or more")]
    NoStep {
        /// The chain's step.
        block: String,
    },

    /// A chain that may not even store the states that it begins with.
    #[error(
        "chain `{block}` has 0 slots\nit needs at least one, for the states that it begins with; leave `slots` out to store all"
    )]
    NoSlot {
        /// The chain's step.
        block: String,
    },

    /// A step of a chain returned another number of tensors than it was given as states.
    #[error(
        "step {step} of chain `{block}` returned another number of tensors than there are states: {found} instead of {expected}\nit must return each state for the next step, in their order; what no step replaces is a `Chain::constant`"
    )]
    States {
        /// The chain's step.
        block: String,
        /// Which run of it, from 0.
        step: usize,
        /// How many states there are.
        expected: usize,
        /// How many tensors it returned.
        found: usize,
    },

    /// An input was made in inference mode, where LibTorch keeps no versions.
    #[error(
        "input `{input}` of replay block `{block}` was made in inference mode and cannot be recorded\npass a copy made outside of inference mode"
    )]
    InferenceInput {
        /// The block.
        block: String,
        /// The input.
        input: String,
    },

    /// A tensor is on a device that is not supported, or not on the rollout's device.
    #[error(
        "{tensor} of replay block `{block}` is on {found}, expected {expected}\nall tensors of a rollout are on the CPU or on one CUDA device"
    )]
    Device {
        /// The block.
        block: String,
        /// The input or output.
        tensor: String,
        /// Where it is.
        found: String,
        /// Where it may be.
        expected: String,
    },

    /// The forward of a block wrote into one of its inputs.
    #[error(
        "replay block `{block}` changes its input `{input}` in place, so a replay would not start from the same values\nwork on a copy inside the block: `{input}.copy()`"
    )]
    InputWritten {
        /// The block.
        block: String,
        /// The input.
        input: String,
    },

    /// A block changed a variable of the `VarStore` in a way that no option allows.
    #[error(
        "replay block `{block}` changes variable `{variable}` ({what}), which its replay needs as it was\nchange variables before the rollout's first block or after `backward`"
    )]
    VariableWritten {
        /// The block.
        block: String,
        /// The variable's name in its `VarStore`.
        variable: String,
        /// What of it differs: values, storage, layout or `requires_grad`.
        what: &'static str,
    },

    /// A block updated a non-trainable variable of the `VarStore`, such as the statistics of a normalisation layer,
    /// without saying so.
    #[error(
        "replay block `{block}` updates buffer `{variable}`, and its replay would update it again\nmark it `#[replay_block(buffers)]` (closures: `BlockOptions::buffers`), or call normalisation layers with `train = false`"
    )]
    BufferWritten {
        /// The block.
        block: String,
        /// The buffer's name in its `VarStore`.
        variable: String,
    },

    /// The forward of a block added variables to a `VarStore`.
    #[error(
        "replay block `{block}` adds variables to the `VarStore`, and its replay would add more\nmake all layers before the rollout"
    )]
    VariableAdded {
        /// The block.
        block: String,
    },

    /// The loss, or a later block, depends on something that left a block's body by another way than its outputs.
    #[error(
        "a tensor that replay block `{block}` computed from its input `{input}` and did not return is used outside of it\nreturn it as an output, or detach it: its gradient would end at the block"
    )]
    Escaped {
        /// The block.
        block: String,
        /// The input.
        input: String,
    },

    /// A rollout on another thread is differentiating the same variables.
    #[error(
        "a variable of shape {shape:?} is being differentiated by a rollout on another thread\nlet the two take turns, or build both with `restore_gradients(false)` and without `accumulate_in`, which adds to `.grad` as it goes"
    )]
    VariableShared {
        /// The variable's shape.
        shape: Vec<i64>,
    },

    /// A leaf's gradient does not fit into the kind in which the rollout adds gradients up.
    #[error(
        "variable `{variable}` is of kind {found:?}, and its gradient cannot be added up in {kind:?} without loss\nchoose another kind in `accumulate_in`, or leave it out"
    )]
    AccumulateKind {
        /// The variable's name, or what is known of a leaf without one.
        variable: String,
        /// Its kind.
        found: tch::Kind,
        /// The kind that was chosen.
        kind: tch::Kind,
    },

    /// The body uses a tensor with a history that is not among the block's inputs.
    #[error(
        "replay block `{block}` uses a tensor made outside of it (by `{operation}`), whose gradient would be lost\npass that tensor to the block as an input"
    )]
    Captured {
        /// The block.
        block: String,
        /// The operation that made the tensor, as LibTorch calls it.
        operation: String,
    },

    /// An input changed between forward and replay.
    #[error(
        "input `{input}` of replay block `{block}` was changed in place after the block's forward\ncall `backward` first, or change a copy"
    )]
    InputChanged {
        /// The block.
        block: String,
        /// The input.
        input: String,
    },

    /// A variable of the `VarStore`, or another trainable tensor that the block uses, changed between forward
    /// and replay.
    #[error(
        "variable `{variable}`, which replay block `{block}` may read, was changed after the block's forward ({what})\ncall `backward` before variables change, before the optimizer's step; buffers are for this rollout's blocks to update"
    )]
    VariableChanged {
        /// The block.
        block: String,
        /// The variable's name, or a description of the tensor.
        variable: String,
        /// What of it differs: values, storage, layout or `requires_grad`.
        what: &'static str,
    },

    /// A block drew random numbers in a rollout that keeps no state of the generators.
    #[error(
        "replay block `{block}` draws random numbers, and its rollout does not preserve the state of the generators\nleave out `preserve_rng_state(false)`, or draw outside of blocks and pass the numbers as an input"
    )]
    RandomWithoutState {
        /// The block.
        block: String,
    },

    /// A block computed on a CUDA device that the rollout did not know of when it began.
    #[error(
        "replay block `{block}` computes on {device}, and neither inputs nor variables are there\nsay so before: `Rollout::builder(&vs).device(device)` keeps the device's random number generator"
    )]
    UnknownDevice {
        /// The block.
        block: String,
        /// The device.
        device: String,
    },

    /// A body changed a tensor that requires grad in place.
    #[error(
        "replay block `{block}` changes an input or a variable that requires grad in place, which autograd cannot follow\nwork on a copy inside the block: `x.copy()`"
    )]
    InPlace {
        /// The block.
        block: String,
    },

    /// The replay drew another amount of random numbers than the forward.
    #[error(
        "replay block `{block}` drew other random numbers in its replay than in its forward ({device} generator)\nit must draw the same ones each time it runs"
    )]
    RngDiverged {
        /// The block.
        block: String,
        /// The generator's device.
        device: String,
    },

    /// The replay computed something else than the forward.
    #[error(
        "replay block `{block}` does not do in its replay what it did in its forward: {what}\nit must do the same each time it runs"
    )]
    GraphMismatch {
        /// The block.
        block: String,
        /// What differs.
        what: String,
    },

    /// The replay returned something else than the forward.
    #[error(
        "replay block `{block}` returned another {what} in its replay: expected {expected}, found {found}\nit must do the same each time it runs"
    )]
    OutputMismatch {
        /// The block.
        block: String,
        /// What differs: the number of outputs, or a property of one of them.
        what: String,
        /// As the forward had it.
        expected: String,
        /// As the replay has it.
        found: String,
    },

    /// The replay computed other values than the forward.
    #[error(
        "replay block `{block}` returned other values in its replay: output {output} differs by up to {difference:e}\nwhat it reads must not change in between: pass it as an input or use a context; draws: leave out `serialize_rng(false)`"
    )]
    ValuesDiffer {
        /// The block.
        block: String,
        /// The position of the output, from 0.
        output: usize,
        /// The largest absolute difference; not a number where one of the two is not, and where only a sample of the values
        /// was compared, as for states of a chain that were not stored.
        difference: f64,
    },

    /// `backward` was given something else than one number.
    #[error(
        "the loss has shape {shape:?}, and `backward` takes a single number\nreduce it first, with `mean` or `sum`"
    )]
    LossNotScalar {
        /// The loss's shape.
        shape: Vec<i64>,
    },

    /// `backward` was given a loss that is no real floating-point number.
    #[error(
        "the loss is of kind {kind:?}, and only a real floating-point number has a gradient\ntake its real part or its absolute value first"
    )]
    LossNotReal {
        /// The loss's kind.
        kind: tch::Kind,
    },

    /// `backward` was given a loss that depends on nothing trainable.
    #[error(
        "the loss does not require grad, so there is nothing to differentiate\ncompute it in grad mode from the outputs of blocks or from trainable variables"
    )]
    LossWithoutGrad,

    /// `backward` on a rollout made for inference.
    #[error(
        "a rollout made with `Rollout::inference` records nothing to differentiate\nmake it with `Rollout::new(&vs)`"
    )]
    Inference,

    /// The loss contains a block of another rollout.
    #[error("{message}")]
    OtherRollout {
        /// Which block, and what to do.
        message: String,
    },

    /// A block was reached by a backward pass that is not `Rollout::backward`.
    #[error("{message}")]
    ForeignBackward {
        /// Which block, and what to do.
        message: String,
    },

    /// A block was to be replayed a second time.
    #[error(
        "replay block `{block}` has been replayed already, and keeps nothing for a second time\nrun the forward again for each backward pass"
    )]
    Used {
        /// The block.
        block: String,
    },

    /// The backward pass came to something that left a block's body by another way than its outputs.
    #[error("{message}")]
    LeftAside {
        /// Which block, and what to do.
        message: String,
    },

    /// The engine came to a block on another thread than its rollout's, and nothing could bring it back.
    #[error("{message}")]
    Thread {
        /// Which block.
        message: String,
    },

    /// Autograd failed outside of the blocks' own code.
    #[error("the backward pass failed: {source}")]
    Backward {
        /// LibTorch's report.
        source: TorchError,
    },

    /// Other processes and this one could not do together what the rollout of a [`Sharded`](crate::Sharded) store needs.
    #[error("{source}")]
    Dist {
        /// What went wrong between them.
        source: Box<DistError>,
    },

    /// LibTorch failed while the library worked on a block.
    #[error("LibTorch failed to {action} for replay block `{block}`: {source}")]
    Torch {
        /// The block.
        block: String,
        /// What was being done.
        action: &'static str,
        /// LibTorch's report.
        source: TorchError,
    },

    /// The LibTorch in this process is not the one that the library was compiled for.
    #[error(
        "LibTorch {found} is loaded, expected {expected}\nbuild and run with the same LibTorch: see `cargo xtask libtorch` and the rpath lines in the README"
    )]
    Version {
        /// The version that was loaded.
        found: String,
        /// The versions that fit.
        expected: &'static str,
    },

    /// CUDA cannot be used.
    #[error("CUDA is not available: {reason}\n{remedy}")]
    Cuda {
        /// What is missing.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// The message, and behind it all that the source has to say: what `unwrap` and a `main` that returns an error print.
impl fmt::Debug for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        match self.source() {
            Some(source) => write!(f, "\ncaused by: {source:?}"),
            None => Ok(()),
        }
    }
}

/// Which run of a block's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The first run, on the way to the loss.
    Forward,
    /// The run inside the backward pass.
    Replay,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Replay => "replay",
        })
    }
}

/// The user's error in at most two lines. One of tch's carries a C++ backtrace, which `source()` keeps.
fn brief(source: &BoxError) -> String {
    let text = source.to_string();
    let is_trace = |line: &str| line.starts_with("Exception raised from") || line.starts_with("frame #");
    let lines = text.lines().take_while(|line| !is_trace(line));
    lines.take(2).collect::<Vec<_>>().join("\n")
}

/// Names the block and the action in which the shim failed.
pub(crate) trait InBlock<T> {
    fn in_block(self, block: &str, action: &'static str) -> Result<T, ReplayError>;
}

impl<T> InBlock<T> for Result<T, ShimError> {
    fn in_block(self, block: &str, action: &'static str) -> Result<T, ReplayError> {
        self.map_err(|error| ReplayError::Torch { block: block.to_owned(), action, source: error.into() })
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
