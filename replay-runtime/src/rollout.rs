//! The public handle: make a rollout, run blocks through it, take its gradient once.

use std::cell::Cell;
use std::marker::PhantomData;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;

use tch::{Device, Tensor};

mod accumulate;
mod version;

pub(crate) use self::version::check_version;
use crate::accumulator::Transaction;
use crate::block::Call;
use crate::context::{NoContext, ReplayContext};
use crate::error::ReplayError;
use crate::ffi::{self, ShimError};
use crate::options::{BlockOptions, Check, EarlyStop, Keep};
use crate::output::ReplayOutput;
use crate::replay::engine_error;
use crate::report::RolloutReport;
use crate::state::{Failure, Label, Options, State};
use crate::store::{ParameterStore, Store};

/// One pass of a model over its own outputs, differentiated as a whole in the memory of one block.
///
/// It borrows the [`VarStore`](tch::nn::VarStore) and the models whose blocks it runs, until [`backward`] consumes
/// it or it is dropped. Gradients of all its blocks add up in the variables' own `.grad`.
///
/// ```no_run
/// # use replay_runtime::{ReplayError, Rollout};
/// # use tch::{Device, Kind, Tensor, nn, nn::Module};
/// # fn main() -> Result<(), ReplayError> {
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 8, 8, Default::default()); // before the rollout, which borrows it
/// let mut state = Tensor::ones([4, 8], (Kind::Float, Device::Cpu));
///
/// let rollout = Rollout::new(&vs);
/// for _ in 0..60 {
///     state = rollout.block("step", &[("state", &state)], |_, inputs| model.forward(&inputs[0]).tanh())?;
/// }
/// let report = rollout.backward(&state.square().mean(Kind::Float))?;
/// println!("{report}");
/// # Ok(())
/// # }
/// ```
///
/// A rollout belongs to the thread that made it: it is neither `Send` nor `Sync`.
///
/// [`backward`]: Rollout::backward
pub struct Rollout<'m> {
    state: Rc<State<'m>>,
    /// A handle for nested blocks does not end the rollout when it is dropped.
    owner: bool,
    /// Invariant, as `std::thread::Scope`: a longer-lived rollout must not pass for a shorter-lived one, whose
    /// blocks may borrow less.
    _model: PhantomData<Cell<&'m ()>>,
}

impl<'m> Rollout<'m> {
    /// A rollout of a model whose parameters are in `store`.
    #[must_use]
    pub fn new(store: &'m impl ParameterStore) -> Self {
        Self::builder(store).build()
    }

    /// A rollout with choices, or over several stores.
    pub fn builder(store: &'m impl ParameterStore) -> RolloutBuilder<'m> {
        RolloutBuilder { stores: vec![store], options: Options::default(), device: None }
    }

    /// A rollout that records nothing: blocks, nested ones too, run as plain calls without gradients. It needs no
    /// store, and [`backward`](Self::backward) on it is an error.
    #[must_use]
    pub fn inference() -> Self {
        Self::of(State::new(Vec::new(), Options { inference: true, ..Options::default() }))
    }

    /// Runs `body` as a block, without a name in the [registry](crate::blocks): for models built from closures
    /// and [`tch::nn::seq`].
    ///
    /// `inputs` are the tensors that `body` reads besides the stores' variables, other trainable leaves, and constants
    /// that nobody changes, by name; it gets them back in this order. It runs once now and once more inside [`backward`](Self::backward), and must do the same both times (a
    /// block inside `n` others runs `n + 2` times: once more with each of them). The rollout it is given is this one, for
    /// blocks inside the block.
    ///
    /// Both runs happen on the rollout's own thread, whatever threads LibTorch uses, so `body` may capture what belongs
    /// to one thread.
    ///
    /// # Errors
    /// What `body` returned as an error, and every misuse that can be seen in the forward; see [`ReplayError`].
    ///
    /// # Panics
    /// If `body` panics; modes, generators and buffers are then as before. LibTorch's panic about a leaf that is changed
    /// in place is an error instead, [`ReplayError::InPlace`].
    pub fn block<R, F>(&self, name: &str, inputs: &[(&str, &Tensor)], body: F) -> Result<R::Value, ReplayError>
    where
        R: ReplayOutput,
        F: Fn(&Rollout<'m>, &[Tensor]) -> R + 'm,
    {
        self.block_with(BlockOptions::new(name), inputs, body)
    }

    /// [`block`](Self::block) with choices: for a closure that updates the statistics of normalisation layers.
    ///
    /// # Errors
    /// As for [`block`](Self::block).
    ///
    /// # Panics
    /// As for [`block`](Self::block).
    pub fn block_with<R, F>(
        &self,
        options: BlockOptions,
        inputs: &[(&str, &Tensor)],
        body: F,
    ) -> Result<R::Value, ReplayError>
    where
        R: ReplayOutput,
        F: Fn(&Rollout<'m>, &[Tensor]) -> R + 'm,
    {
        let label = Label::new(options, inputs.iter().map(|(name, _)| (*name).to_owned()));
        let tensors: Vec<_> = inputs.iter().map(|(_, tensor)| Some(*tensor)).collect();
        self.call(label, &tensors, NoContext, move |rollout, leaves| {
            let leaves: Vec<_> = leaves.iter().flatten().map(Tensor::shallow_clone).collect();
            body(rollout, &leaves)
        })
    }

    /// What generated code and [`block`](Self::block) come down to.
    pub(crate) fn call<R, C, F>(
        &self,
        label: Label,
        inputs: &[Option<&Tensor>],
        context: C,
        body: F,
    ) -> Result<R::Value, ReplayError>
    where
        R: ReplayOutput,
        C: ReplayContext + 'm,
        F: Fn(&Rollout<'m>, &[Option<Tensor>]) -> R + 'm,
    {
        check_version()?;
        let call = Call {
            state: &self.state,
            label: Rc::new(label),
            inputs,
            context: Rc::new(context),
            link: None,
            body: Rc::new(move |state, leaves| body(&Rollout::nested(state), leaves).into_tensors()),
        };
        call.run().map(R::from_tensors)
    }

    /// Computes the gradient of `loss`, a single number, with respect to every leaf that it depends on, through
    /// all blocks, and adds it to their `.grad`.
    ///
    /// The rollout ends here, also on failure.
    ///
    /// # Errors
    /// What a block's body returned in its replay, every change between forward and replay that would make the
    /// gradient wrong, and failures of LibTorch; see [`ReplayError`]. Gradients, generators, modes and buffers are then what they were before,
    /// gradients unless [`restore_gradients(false)`](RolloutBuilder::restore_gradients) was chosen.
    ///
    /// # Panics
    /// If a block's body panics in its replay, with the body's own payload and after everything was restored.
    pub fn backward(self, loss: &Tensor) -> Result<RolloutReport, ReplayError> {
        // Not a failure of the pass that is under way.
        let _pass = self.state.windows.begin_pass()?;
        let outcome = if self.state.windows.any() {
            // Other processes must hear of a panic too.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.differentiate(loss)));
            outcome.unwrap_or_else(|payload| Err(Failure::Panic(payload)))
        } else {
            self.differentiate(loss)
        };
        let failure = match outcome {
            Ok(report) => return Ok(report),
            Err(failure) => failure,
        };
        self.state.windows.abort(&failure.brief());
        drop(self);
        failure.raise()
    }

    /// Gradients, generators, modes and buffers are as before where it fails.
    fn differentiate(&self, loss: &Tensor) -> Result<RolloutReport, Failure> {
        check_version()?;
        self.state.windows.check_begun()?;
        self.check_loss(loss)?;
        let started = Instant::now();
        let leaves = self.leaves(loss)?;
        self.check_kinds(&leaves)?;
        let options = self.state.options;
        let transaction = Transaction::begin(&leaves, options)?;
        let outcome = ffi::backward(self.state.id, &*self.state, loss, &leaves, options.accumulate);
        let outcome = outcome.map(|copied| self.state.ledger.borrow_mut().gradients_copied(copied));
        let buffers = self.state.watch.end_all();
        let failure = self.failure(outcome).or_else(|| self.state.windows.flush().err().map(Failure::Error));
        if let Some(failure) = failure {
            return Err(failure);
        }
        buffers.map_err(|error| ReplayError::Backward { source: error.into() })?;
        let copied = transaction.commit()?;
        self.state.ledger.borrow_mut().gradients_copied(copied);
        Ok(self.state.ledger.borrow().report(started.elapsed()))
    }

    /// Why the pass failed, if it did: what a block kept says more than what the engine made of it.
    fn failure(&self, outcome: Result<(), ShimError>) -> Option<Failure> {
        let engine = || outcome.err().map(|error| Failure::Error(engine_error(error)));
        self.state.take_failure().or_else(engine)
    }

    fn check_loss(&self, loss: &Tensor) -> Result<(), ReplayError> {
        if self.state.options.inference {
            return Err(ReplayError::Inference);
        }
        if !loss.defined() || loss.numel() != 1 {
            let shape = if loss.defined() { loss.size() } else { Vec::new() };
            return Err(ReplayError::LossNotScalar { shape });
        }
        if !loss.requires_grad() {
            return Err(ReplayError::LossWithoutGrad);
        }
        if loss.is_complex() {
            return Err(ReplayError::LossNotReal { kind: loss.kind() });
        }
        Ok(())
    }

    /// Every leaf that the backward pass may accumulate into: the stores' variables as they are now, trainable
    /// tensors that blocks captured, and the leaves of the graph around the blocks, among which none may belong to the
    /// inside of a block.
    fn leaves(&self, loss: &Tensor) -> Result<Vec<Tensor>, ReplayError> {
        let (numbers, spans) = self.state.recorded_spans();
        let around = ffi::graph([loss], &spans).map_err(|error| ReplayError::Backward { source: error.into() })?;
        for (number, _) in numbers.into_iter().zip(around.touched).filter(|(_, touched)| *touched) {
            self.state.left_aside(number)?;
        }
        let around = around.leaves;
        for (identity, _) in &around {
            self.state.check_not_escaped(*identity)?;
            self.state.windows.is_whole(*identity)?;
        }
        let captured = self.state.captured.borrow();
        let captured = captured.values().filter_map(ffi::WeakTensor::upgrade);
        let around = around.into_iter().map(|(_, leaf)| leaf);
        Ok(self.state.trainable().chain(captured).chain(around).collect())
    }

    /// A handle for blocks inside a block.
    pub(crate) fn nested(state: &Rc<State<'m>>) -> Self {
        Self { state: Rc::clone(state), owner: false, _model: PhantomData }
    }

    pub(crate) fn state(&self) -> &Rc<State<'m>> {
        &self.state
    }

    fn of(state: Rc<State<'m>>) -> Self {
        // Without it, which needs memory for a thread-local, this thread would pass for one without rollouts.
        let _ = ffi::register_thread(state.options.rng.orders_draws());
        // Before the first backward pass, if this rollout is there first: LibTorch's engine gets hooks for saved tensors.
        ffi::Tape::available();
        Self { state, owner: true, _model: PhantomData }
    }
}

impl Drop for Rollout<'_> {
    fn drop(&mut self) {
        if self.owner {
            self.state.clear();
        }
    }
}

impl std::fmt::Debug for Rollout<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rollout").field("options", &self.state.options).finish_non_exhaustive()
    }
}

/// Choices for a [`Rollout`].
#[must_use = "a builder does nothing until `build` is called"]
pub struct RolloutBuilder<'m> {
    stores: Vec<&'m dyn Store>,
    options: Options,
    device: Option<Device>,
}

impl<'m> RolloutBuilder<'m> {
    /// Adds the variables of another store: a critic beside the generator, a frozen teacher.
    pub fn store(mut self, store: &'m impl ParameterStore) -> Self {
        self.stores.push(store);
        self
    }

    /// Keeps inputs on CUDA in pinned host memory between forward and replay. Default: off. CPU inputs stay where
    /// they are. Not yet run on a GPU.
    pub fn offload(mut self, offload: bool) -> Self {
        self.options.offload = offload;
        self
    }

    /// Whether a failed [`backward`](Rollout::backward) puts the gradients from before back. Default: on. It costs
    /// nothing where there are none; where there are, they are held beside the new ones until the end. Off, new
    /// gradients add to old ones at once, and a failure leaves the sums so far.
    pub fn restore_gradients(mut self, restore: bool) -> Self {
        self.options.transaction = restore;
        self
    }

    /// Which blocks' graphs are kept until [`backward`](Rollout::backward), so that they need no replay. Default: [`Keep::None`].
    pub fn keep_graphs(mut self, keep: Keep) -> Self {
        self.options.keep = keep;
        self
    }

    /// Which replays end as soon as all that the gradient needs has been computed again. Default: [`EarlyStop::Marked`].
    pub fn early_stop(mut self, early_stop: EarlyStop) -> Self {
        self.options.early_stop = early_stop;
        self
    }

    /// What of a replay's outputs is compared with the forward's. Default: [`Check::Metadata`].
    pub fn check(mut self, check: Check) -> Self {
        self.options.check = check;
        self
    }

    /// Whether replays draw the random numbers of their forwards. Default: on, which keeps 5 KB for each block that
    /// draws. Off, no state is kept, and a block that draws is an error.
    pub fn preserve_rng_state(mut self, preserve: bool) -> Self {
        self.options.rng.preserve = preserve;
        self
    }

    /// Whether blocks that draw random numbers wait for each other while several threads have rollouts. Default: on,
    /// since LibTorch has one CPU generator for the whole process.
    ///
    /// From its first draw to its end such a block holds a lock, and while no other thread has had a rollout yet, each
    /// block does from its beginning; so a body must not wait for another thread that has rollouts and draws. A thread
    /// counts from its first rollout to the thread's end, and its draws outside of blocks wait too. From the second thread on,
    /// an observer looks at every operation of the process, at less than a tenth of the smallest one's cost.
    /// [`tch::manual_seed`] is no operation and takes no lock: seed before the threads start.
    ///
    /// Off, blocks run side by side, and their outputs are compared bit for bit instead: where another thread's draws
    /// have come in between, `backward` returns [`ReplayError::ValuesDiffer`]. A replay sets the shared generator back for a while, so that other
    /// threads may draw numbers twice. Choose the same for all rollouts of a process.
    pub fn serialize_rng(mut self, serialize: bool) -> Self {
        self.options.rng.serialize = serialize;
        self
    }

    /// The device of the rollout. Only needed where neither inputs nor variables of the first blocks say so: a block
    /// with all of these on the CPU that computes on a CUDA device otherwise ends in an error, since the device's
    /// generator was not kept before it.
    ///
    /// # Panics
    /// If `device` is neither the CPU nor a CUDA device.
    pub fn device(mut self, device: Device) -> Self {
        assert!(
            matches!(device, Device::Cpu | Device::Cuda(_)),
            "a rollout is on the CPU or on CUDA, not on {device:?}"
        );
        self.device = Some(device);
        self
    }

    /// The rollout.
    #[must_use]
    pub fn build(mut self) -> Rollout<'m> {
        // Whole gradients must not meet pieces of older ones.
        self.options.transaction |= self.stores.iter().any(|store| store.shards().is_some());
        let state = State::new(self.stores, self.options);
        state.cuda.set(self.device.filter(|device| device.is_cuda()));
        Rollout::of(state)
    }
}

impl std::fmt::Debug for RolloutBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stores = self.stores.len();
        f.debug_struct("RolloutBuilder").field("stores", &stores).field("options", &self.options).finish()
    }
}
