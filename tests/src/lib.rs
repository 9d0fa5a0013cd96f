//! What the tests share: one program, run plainly, blockwise and replayed, and compared bit for bit.
//!
//! The two oracles are those of the README's guarantees. *Plain* is LibTorch's autograd over the whole graph. *Blockwise* is
//! LibTorch's autograd over one block at a time, on detached inputs, last block first, the gradients of variables
//! added up in that order. They agree bit for bit where sums associate alike; a test says which it uses.

pub mod narrow;
pub mod program;
pub mod ranks;

use std::cell::RefCell;
use std::collections::BTreeMap;

use replay_runtime::{BlockOptions, EarlyStop, Keep, ReplayOutput, Rollout};
use tch::{Device, Kind, Tensor, nn};

/// How a program's blocks are run.
pub enum How<'r, 'm> {
    /// As plain calls; LibTorch differentiates the whole graph.
    Plain,
    /// Each on detached inputs, noted on a tape.
    Blockwise(&'r Tape),
    /// As blocks of a rollout.
    Replay(&'r Rollout<'m>),
    /// As blocks of a rollout that end early.
    EarlyStop(&'r Rollout<'m>),
}

impl<'m> How<'_, 'm> {
    /// Runs one block.
    ///
    /// # Panics
    /// If the block fails.
    pub fn block<R: ReplayOutput>(
        &self,
        name: &str,
        inputs: &[(&str, &Tensor)],
        body: impl Fn(&[Tensor]) -> R + 'm,
    ) -> R::Value {
        match self {
            Self::Plain => {
                let inputs: Vec<_> = inputs.iter().map(|(_, input)| input.shallow_clone()).collect();
                R::from_tensors(body(&inputs).into_tensors().expect("the body succeeds"))
            }
            Self::Blockwise(tape) => R::from_tensors(tape.block(inputs, body)),
            Self::Replay(rollout) => {
                rollout.block(name, inputs, move |_, inputs| body(inputs)).expect("the block succeeds")
            }
            Self::EarlyStop(rollout) => {
                let options = BlockOptions::new(name).early_stop(true);
                rollout.block_with(options, inputs, move |_, inputs| body(inputs)).expect("the block succeeds")
            }
        }
    }
}

/// The blocks of a blockwise run.
///
/// For real numbers, and programs in which what stands around the blocks uses each tensor once: a sum there would be
/// taken in another order than by the engine. The oracle in `program/blockwise.rs` has neither limit.
#[derive(Default)]
pub struct Tape(RefCell<Vec<Noted>>);

struct Noted {
    inputs: Vec<Tensor>,
    leaves: Vec<Tensor>,
    outputs: Vec<Tensor>,
    handed_out: Vec<Tensor>,
}

impl Tape {
    fn block<R: ReplayOutput>(&self, inputs: &[(&str, &Tensor)], body: impl Fn(&[Tensor]) -> R) -> Vec<Tensor> {
        let inputs: Vec<_> = inputs.iter().map(|(_, input)| input.shallow_clone()).collect();
        let leaves: Vec<_> = inputs.iter().map(leaf).collect();
        let outputs = body(&leaves).into_tensors().expect("the body succeeds");
        let handed_out: Vec<_> = outputs.iter().map(leaf).collect();
        let result = handed_out.iter().map(Tensor::shallow_clone).collect();
        self.0.borrow_mut().push(Noted { inputs, leaves, outputs, handed_out });
        result
    }

    /// The gradients of `wanted`, in its order; `None` where none arrived.
    fn backward(&self, loss: &Tensor, wanted: &[Tensor]) -> Vec<Option<Tensor>> {
        let tape = self.0.borrow();
        let mut sums: Vec<Option<Tensor>> = wanted.iter().map(|_| None).collect();
        // What arrived so far for each output of each block.
        let mut arrived: Vec<Vec<Option<Tensor>>> =
            tape.iter().map(|noted| noted.handed_out.iter().map(|_| None).collect()).collect();
        around(&tape, loss, wanted, &mut arrived, &mut sums);
        for (i, noted) in tape.iter().enumerate().rev() {
            let grads: Vec<_> = arrived[i].iter_mut().map(Option::take).collect();
            let reached = noted.outputs.iter().zip(grads).filter_map(|(output, grad)| Some((output, grad?)));
            // The gradient of each product's sum with respect to `output` is `grad`, to the last bit.
            let products = reached.map(|(output, grad)| (output * grad).sum(output.kind()));
            let Some(inner) = products.reduce(|a, b| a + b) else { continue };
            let leaf_grads = with_leaves(&inner, &noted.leaves, wanted, &mut sums);
            for (input, grad) in noted.inputs.iter().zip(leaf_grads) {
                let Some(grad) = grad else { continue };
                around(&tape, &(input * grad).sum(input.kind()), wanted, &mut arrived, &mut sums);
            }
        }
        sums
    }
}

/// Differentiates the graph around the blocks: adds to what arrived at their outputs and at `wanted`.
fn around(
    tape: &[Noted],
    root: &Tensor,
    wanted: &[Tensor],
    arrived: &mut [Vec<Option<Tensor>>],
    sums: &mut [Option<Tensor>],
) {
    if !root.requires_grad() {
        return;
    }
    let outputs = tape.iter().flat_map(|noted| &noted.handed_out);
    let targets: Vec<&Tensor> = outputs.chain(wanted).collect();
    let slots = arrived.iter_mut().flatten().chain(sums);
    let trained: Vec<_> = targets.into_iter().zip(slots).filter(|(t, _)| t.requires_grad()).collect();
    let targets: Vec<&Tensor> = trained.iter().map(|(target, _)| *target).collect();
    let grads = Tensor::run_backward(&[root], &targets, true, false);
    for ((_, slot), grad) in trained.into_iter().zip(grads) {
        add(slot, &grad);
    }
}

/// Differentiates one block: adds to `sums`, returns the gradients of its leaves.
fn with_leaves(
    root: &Tensor,
    leaves: &[Tensor],
    wanted: &[Tensor],
    sums: &mut [Option<Tensor>],
) -> Vec<Option<Tensor>> {
    if !root.requires_grad() {
        return leaves.iter().map(|_| None).collect();
    }
    let targets: Vec<&Tensor> = leaves.iter().chain(wanted).filter(|t| t.requires_grad()).collect();
    let mut grads = Tensor::run_backward(&[root], &targets, true, false).into_iter();
    let mut next = |t: &Tensor| t.requires_grad().then(|| grads.next()).flatten().filter(Tensor::defined);
    let leaf_grads = leaves.iter().map(&mut next).collect();
    for (target, slot) in wanted.iter().zip(sums) {
        if let Some(grad) = next(target) {
            add(slot, &grad);
        }
    }
    leaf_grads
}

pub(crate) fn add(slot: &mut Option<Tensor>, grad: &Tensor) {
    if grad.defined() {
        *slot = Some(slot.take().map_or_else(|| grad.shallow_clone(), |sum| sum + grad));
    }
}

pub(crate) fn leaf(tensor: &Tensor) -> Tensor {
    let leaf = tensor.detach();
    if tensor.requires_grad() { leaf.set_requires_grad(true) } else { leaf }
}

/// An oracle of the guarantee *values*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oracle {
    /// Plain autograd over the whole graph.
    Plain,
    /// Plain autograd over one block at a time.
    Blockwise,
}

/// What a run gives: the loss, and the gradients of the variables and of the program's own leaves.
#[derive(Debug)]
pub struct Outcome {
    /// The loss.
    pub loss: Tensor,
    /// The gradients by name; `None` where none arrived.
    pub grads: BTreeMap<String, Option<Tensor>>,
}

/// A model and what its program differentiates besides its variables.
pub struct Setup<M> {
    /// Holds the variables.
    pub vs: nn::VarStore,
    /// The model.
    pub model: M,
    /// Leaves that are no variables, by name.
    pub leaves: Vec<(String, Tensor)>,
}

impl<M> Setup<M> {
    /// A model on the CPU, the same one each time.
    pub fn new(build: impl FnOnce(&nn::Path<'_>) -> M) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let model = build(&vs.root());
        Self { vs, model, leaves: Vec::new() }
    }

    /// Adds a leaf.
    #[must_use]
    pub fn leaf(mut self, name: &str, tensor: Tensor) -> Self {
        self.leaves.push((name.to_owned(), tensor));
        self
    }

    /// The names and handles of everything that gets a gradient, sorted.
    #[must_use]
    pub fn trained(&self) -> BTreeMap<String, Tensor> {
        let leaves = self.leaves.iter().map(|(name, leaf)| (name.clone(), leaf.shallow_clone()));
        self.vs.variables().into_iter().chain(leaves).collect()
    }

    /// Reads `.grad` of everything trained.
    #[must_use]
    pub fn grads(&self) -> BTreeMap<String, Option<Tensor>> {
        let grad = |tensor: &Tensor| Some(tensor.grad()).filter(Tensor::defined);
        self.trained().iter().map(|(name, tensor)| (name.clone(), grad(tensor))).collect()
    }
}

/// What a rollout makes of its blocks' graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Which graphs it keeps.
    pub keep: Keep,
    /// Which replays end early.
    pub early_stop: EarlyStop,
    /// Whether blocks are marked `early_stop`.
    pub marked: bool,
}

/// All of them, the default first.
pub const MODES: [Mode; 6] = [
    Mode { keep: Keep::None, early_stop: EarlyStop::Off, marked: false },
    Mode { keep: Keep::None, early_stop: EarlyStop::Marked, marked: true },
    Mode { keep: Keep::None, early_stop: EarlyStop::Always, marked: false },
    Mode { keep: Keep::Last(1), early_stop: EarlyStop::Off, marked: false },
    Mode { keep: Keep::Last(2), early_stop: EarlyStop::Marked, marked: true },
    Mode { keep: Keep::Bytes(u64::MAX), early_stop: EarlyStop::Off, marked: false },
];

/// Runs the same program on a fresh model by the oracle and replayed in all [`MODES`], and demands equal bits.
///
/// # Panics
/// If they differ anywhere.
pub fn assert_exact<M>(
    oracle: Oracle,
    setup: impl Fn() -> Setup<M>,
    program: impl for<'m> Fn(&How<'_, 'm>, &'m M, &[(String, Tensor)]) -> Tensor,
) {
    let expected = {
        let setup = setup();
        let tape = Tape::default();
        let how = if oracle == Oracle::Plain { How::Plain } else { How::Blockwise(&tape) };
        let loss = program(&how, &setup.model, &setup.leaves);
        let grads = match oracle {
            Oracle::Plain => {
                loss.backward();
                setup.grads()
            }
            Oracle::Blockwise => {
                let trained = setup.trained();
                let targets: Vec<_> = trained.values().map(Tensor::shallow_clone).collect();
                trained.keys().cloned().zip(tape.backward(&loss, &targets)).collect()
            }
        };
        Outcome { loss: loss.detach(), grads }
    };
    for mode in MODES {
        println!("{mode:?}");
        assert_same(&expected, &replayed_in(mode, &setup(), &program));
    }
    assert!(expected.grads.values().any(Option::is_some), "the program trains nothing");
}

/// Runs a program replayed.
///
/// # Panics
/// If a block or the backward pass fails.
pub fn replayed<M>(
    setup: &Setup<M>,
    program: impl for<'m> Fn(&How<'_, 'm>, &'m M, &[(String, Tensor)]) -> Tensor,
) -> Outcome {
    replayed_in(MODES[0], setup, program)
}

/// Runs a program replayed.
///
/// # Panics
/// If a block or the backward pass fails.
pub fn replayed_in<M>(
    mode: Mode,
    setup: &Setup<M>,
    program: impl for<'m> Fn(&How<'_, 'm>, &'m M, &[(String, Tensor)]) -> Tensor,
) -> Outcome {
    let rollout = Rollout::builder(&setup.vs).keep_graphs(mode.keep).early_stop(mode.early_stop).build();
    let how = if mode.marked { How::EarlyStop(&rollout) } else { How::Replay(&rollout) };
    let loss = program(&how, &setup.model, &setup.leaves);
    rollout.backward(&loss).expect("the backward pass succeeds");
    Outcome { loss: loss.detach(), grads: setup.grads() }
}

/// Demands equal bits of two outcomes.
///
/// # Panics
/// If they differ anywhere.
pub fn assert_same(expected: &Outcome, found: &Outcome) {
    assert!(same_bits(&expected.loss, &found.loss), "loss: {:?} != {:?}", expected.loss, found.loss);
    for (name, expected) in &expected.grads {
        match (expected, &found.grads[name]) {
            (None, None) => {}
            (Some(a), Some(b)) => assert!(same_bits(a, b), "gradient of {name} differs:\n{a}\n{b}"),
            (a, b) => panic!("gradient of {name}: expected {:?}, found {:?}", a.is_some(), b.is_some()),
        }
    }
}

/// Whether two tensors have equal shapes, kinds and bits.
#[must_use]
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size() && a.kind() == b.kind() && bytes(a) == bytes(b)
}

/// The bytes of a tensor's values, in row-major order.
#[must_use]
pub fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.detach().to_device(Device::Cpu).to_dense(None::<Kind>, false).contiguous();
    let size = tensor.numel() * tensor.kind().elt_size_in_bytes();
    let mut bytes = vec![0; size];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// Normal random numbers on the CPU, the same ones for the same seed.
pub fn randn(seed: i64, size: &[i64], kind: Kind) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(size, (kind, Device::Cpu))
}

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// And that of the page on sharded training.
#[cfg(doctest)]
#[doc = include_str!("../../docs/sharded.md")]
struct ShardedPage;
