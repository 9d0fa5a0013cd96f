//! Random programs of blocks, as data that can be printed and shrunk, and what runs them by each oracle.
//!
//! A program refers to tensors and parameters by numbers that are taken modulo how many there are, and every operation
//! takes any tensor, so whatever is generated or left over by shrinking can be run.
//!
//! Numbers come in two families. *Exact* ones are small integers under operations that round nothing, so that sums give
//! the same bits in every order and plain autograd is an oracle for every program. *Real* ones are compared with
//! [blockwise](blockwise) autograd, which adds in the order of a rollout, and with plain autograd too where
//! [`associates`] says that both add alike.

mod associates;
mod blockwise;
mod census;
mod check;
mod fault;
mod ops;
mod run;
mod strategy;
mod world;

use std::fmt;
use std::sync::Arc;

use tch::Kind;

pub use census::Census;
pub use check::check;
pub use strategy::programs;

/// A program: leaves, steps over them, and a loss.
#[derive(Clone, Debug)]
pub struct Program {
    /// What its numbers are.
    pub numbers: Numbers,
    /// The kind of its numbers.
    pub kind: Kind,
    /// The shape that most of its tensors have.
    pub shape: Vec<i64>,
    /// The parameters, one at least.
    pub params: Vec<Param>,
    /// The tensors that it starts from, one at least.
    pub leaves: Vec<Leaf>,
    /// What is done with them.
    pub steps: Vec<Step>,
    /// The tensors that the loss is made of, by how many are newer.
    pub loss: Vec<usize>,
    /// Whether each of their elements has a weight of its own; without, their gradients are expanded numbers.
    pub weighted_loss: bool,
    /// Whether everything trained has a gradient beforehand.
    pub old_gradients: bool,
    /// How many rollouts run one after the other, their gradients adding up.
    pub rollouts: usize,
    /// A failure before that.
    pub failure: Option<Failure>,
    /// For values and the random numbers inside.
    pub seed: i64,
    /// What its rollouts make of graphs: one of [`MODES`](crate::MODES).
    pub mode: usize,
    /// Whether every replay's outputs are compared with its forward's; then none ends early.
    pub compared: bool,
}

/// A family of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Small integers.
    Exact,
    /// Anything.
    Real,
}

/// A parameter.
#[derive(Clone, Debug)]
pub struct Param {
    /// A square matrix, or else a vector.
    pub matrix: bool,
    /// Who knows it.
    pub home: Home,
}

/// Who knows a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// The store.
    Store,
    /// The store, and it is not trained now.
    Frozen,
    /// Nobody: a trainable tensor that blocks capture.
    Foreign,
    /// The store, as a second name of the first parameter.
    Tied,
}

/// A tensor that a program starts from.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// Whether it gets a gradient.
    pub grad: bool,
    /// How it lies in memory.
    pub layout: Layout,
}

/// How a leaf lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row by row.
    Dense,
    /// With its last two dimensions swapped.
    Transposed,
    /// One row for all.
    Expanded,
    /// As a part of a larger tensor.
    Sliced,
    /// Row by row, and it holds indices.
    Index,
}

/// One step; the tensors it makes are numbered after those that are there.
#[derive(Clone)]
pub enum Step {
    /// An operation on one tensor or two.
    Op(Op, usize, usize),
    /// A block.
    Block(Arc<Block>),
}

/// A block. Its body sees its inputs, then what its steps make.
#[derive(Clone)]
pub struct Block {
    /// Its number in the program, outer before inner.
    pub id: usize,
    /// Which tensors it is given.
    pub inputs: Vec<usize>,
    /// Its body.
    pub steps: Vec<Step>,
    /// What it returns: one to three.
    pub outputs: Vec<Output>,
    /// Whether it runs under autocast, as far as the program's numbers are of a kind that is cast.
    pub autocast: bool,
    /// Whether the caller changes the first output in place, where that is [`Output::Doubled`].
    pub change_output: bool,
}

/// One line for an operation, so that a program fits on a screen.
impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(op, a, b) if op.is_binary() => write!(f, "{:?} of {a} and {b}", Plainly(op)),
            Self::Op(op, a, _) => write!(f, "{:?} of {a}", Plainly(op)),
            Self::Block(block) => block.fmt(f),
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(&format!("Block {}", self.id))
            .field("inputs", &Plainly(&self.inputs))
            .field("steps", &self.steps)
            .field("outputs", &Plainly(&self.outputs))
            .field("autocast", &self.autocast)
            .field("change_output", &self.change_output)
            .finish()
    }
}

/// On one line, whatever is around it.
struct Plainly<'a, T: fmt::Debug>(&'a T);

impl<T: fmt::Debug> fmt::Debug for Plainly<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// One output of a block.
#[derive(Clone, Debug)]
pub enum Output {
    /// A tensor as it is, an input perhaps.
    Value(usize),
    /// Twice a tensor: fresh storage that no gradient needs.
    Doubled(usize),
    /// A transposed view.
    View(usize),
    /// A parameter.
    Param(usize),
    /// A tensor without its history.
    Detached(usize),
    /// The places of the largest elements.
    Indices(usize),
}

/// An operation; what each does with real and with exact numbers is in `ops.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what they are called")]
pub enum Op {
    Linear(usize),
    Scale(usize),
    Shift(usize),
    Squash,
    Curve,
    Mix,
    Norm,
    Dropout,
    Noise,
    Normal,
    Seeded,
    InPlace,
    NoGrad,
    Add,
    Mul,
    Where,
    Cat,
    Gather,
    Transpose,
    Slice,
    Expand,
    Sum,
    Argmax,
    Detach,
    /// Reads the program's buffer.
    Read,
    /// Reads it and then changes it; in bodies of blocks only.
    Tick,
}

/// A failure of one block in one of its runs, if it has that many.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which block.
    pub block: usize,
    /// In which run of its body, from 1.
    pub run: usize,
    /// How.
    pub way: Way,
    /// After the body's steps, or before.
    pub late: bool,
    /// Where it strikes in a forward: whether the same rollout tries that step again and goes on.
    pub retry: bool,
}

/// How a body fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It returns an error.
    Error,
    /// It returns an error of LibTorch.
    TorchError,
    /// It panics with a text.
    PanicText,
    /// It panics with another value.
    PanicValue,
    /// LibTorch throws and tch panics.
    TorchPanic,
    /// It panics where tch's own `no_grad` leaves grad mode off.
    PanicWithoutGrad,
}
