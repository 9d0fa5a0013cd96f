//! What a rollout knows while it lives: the table of its blocks, what it keeps for them, and where it stands. The
//! public [`Rollout`](crate::Rollout) is a handle to it; blocks and replays work on it.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::resume_unwind;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, Kind, Tensor};

use crate::buffers::Watch;
use crate::context::Contexts;
use crate::error::{InBlock, Pass, ReplayError};
use crate::ffi::{self, Fingerprint, Graveyard, Modes, NodeState, ShimError, WeakTensor};
use crate::link::Link;
use crate::options::{BlockOptions, Check, EarlyStop, Keep};
use crate::output::BoxError;
use crate::recorded::{KeptGraphs, Recorded};
use crate::report::Ledger;
use crate::rng::{RngPolicy, RngRecord, RngStates};
use crate::saved::SavedInputs;
use crate::store::{self, Store, UnitKey};
use crate::variables::{Change, Snapshot};
use crate::windows::Windows;

/// A block's body with its types forgotten. It gets the state, so that it can make a handle for nested blocks,
/// and the leaves of its inputs.
pub(crate) type Body<'m> = dyn Fn(&Rc<State<'m>>, &[Option<Tensor>]) -> Result<Vec<Tensor>, BoxError> + 'm;

/// How a block and its inputs are called, and what it may do.
pub(crate) struct Label {
    pub(crate) block: Arc<str>,
    pub(crate) inputs: Vec<String>,
    /// It may update non-trainable variables.
    pub(crate) buffers: bool,
    /// Its replay may end by unwinding.
    pub(crate) early_stop: bool,
    /// The object whose parameters it has, where these come and go.
    pub(crate) unit: Option<UnitKey>,
}

impl Label {
    pub(crate) fn new(options: BlockOptions, inputs: impl IntoIterator<Item = String>) -> Self {
        let BlockOptions { name, buffers, early_stop, unit } = options;
        Self { block: name.into(), inputs: inputs.into_iter().collect(), buffers, early_stop, unit }
    }

    /// The error for what the body has changed since `before` and may not.
    pub(crate) fn written(&self, before: &Snapshot) -> Result<Option<ReplayError>, ReplayError> {
        let change = if self.buffers { before.change_beside_buffers() } else { before.change() };
        let change = change.in_block(&self.block, "read the variables")?;
        Ok(change.map(|Change { variable, what, updates_buffer }| {
            let block = self.block.to_string();
            if updates_buffer {
                ReplayError::BufferWritten { block, variable }
            } else {
                ReplayError::VariableWritten { block, variable, what }
            }
        }))
    }
}

/// What a block's replay needs beside the saved inputs, which are the node's.
pub(crate) struct Entry<'m> {
    pub(crate) label: Rc<Label>,
    /// Its place in a chain, whose states may not be saved.
    pub(crate) link: Option<Link>,
    pub(crate) body: Rc<Body<'m>>,
    pub(crate) contexts: Contexts<'m>,
    pub(crate) modes: Modes,
    pub(crate) rng: RngRecord,
    pub(crate) variables: Rc<Snapshot>,
    /// The variables as the forward left them, where it may have updated buffers.
    pub(crate) left: Rc<Snapshot>,
    pub(crate) captured: Vec<(WeakTensor, Fingerprint)>,
    pub(crate) inputs: Vec<Option<InputRecord>>,
    pub(crate) outputs: Vec<OutputRecord>,
    /// Copies of the outputs, where they are compared.
    pub(crate) values: Option<Vec<Tensor>>,
    /// The positions of the outputs that the node stands before.
    pub(crate) attached: Vec<usize>,
    /// The forward's graph, where it is used again.
    pub(crate) recorded: Option<Recorded>,
    pub(crate) node: Arc<NodeState>,
}

/// What is known of an input beside its saved values.
#[derive(Clone, Copy)]
pub(crate) struct InputRecord {
    pub(crate) print: Fingerprint,
    pub(crate) requires_grad: bool,
}

/// A leaf that lives on after its block's forward.
pub(crate) struct Escaped {
    pub(crate) block: Arc<str>,
    pub(crate) input: String,
    /// Keeps the identity from being used again.
    pub(crate) _leaf: WeakTensor,
}

/// What an output of the replay must match.
#[derive(PartialEq)]
pub(crate) struct OutputRecord {
    pub(crate) size: Vec<i64>,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) requires_grad: bool,
}

impl OutputRecord {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            size: tensor.size(),
            kind: tensor.kind(),
            device: tensor.device(),
            requires_grad: tensor.requires_grad(),
        }
    }
}

impl fmt::Display for OutputRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grad = if self.requires_grad { "with" } else { "without" };
        write!(f, "{:?} {:?} on {:?} {grad} grad", self.kind, self.size, self.device)
    }
}

/// Choices of the builder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Blocks record nothing and run without gradients.
    pub(crate) inference: bool,
    /// CUDA inputs wait for their replay in host memory.
    pub(crate) offload: bool,
    /// A failed backward pass puts old gradients back.
    pub(crate) transaction: bool,
    /// The kind in which gradients are added up, Float or Double; `None`: each in its leaf's own.
    pub(crate) accumulate: Option<Kind>,
    pub(crate) check: Check,
    pub(crate) rng: RngPolicy,
    pub(crate) keep: Keep,
    pub(crate) early_stop: EarlyStop,
}

impl Default for Options {
    fn default() -> Self {
        let rng = RngPolicy { preserve: true, serialize: true };
        Self {
            inference: false,
            offload: false,
            transaction: true,
            accumulate: None,
            check: Check::default(),
            rng,
            keep: Keep::default(),
            early_stop: EarlyStop::default(),
        }
    }
}

/// Why a backward pass failed, kept while the failure travels through the engine.
pub(crate) enum Failure {
    Error(ReplayError),
    Panic(Box<dyn Any + Send>),
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        Self::Error(error)
    }
}

impl Failure {
    /// Goes on with it.
    pub(crate) fn raise<T>(self) -> Result<T, ReplayError> {
        match self {
            Self::Error(error) => Err(error),
            Self::Panic(payload) => resume_unwind(payload),
        }
    }

    /// One line for other processes.
    pub(crate) fn brief(&self) -> String {
        match self {
            Self::Error(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
            Self::Panic(payload) => {
                let text = payload.downcast_ref::<&str>().copied();
                let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
                format!("a panic: {}", text.unwrap_or("of no text"))
            }
        }
    }
}

pub(crate) struct State<'m> {
    pub(crate) id: u64,
    pub(crate) options: Options,
    pub(crate) saved: SavedInputs,
    pub(crate) graveyard: Arc<Graveyard>,
    pub(crate) ledger: RefCell<Ledger>,
    /// Trainable tensors that blocks use and no store knows.
    pub(crate) captured: RefCell<HashMap<usize, WeakTensor>>,
    /// What inner blocks captured in the forward of the outer block under way: its replay depends on it too.
    pub(crate) inner_captured: RefCell<Vec<(Tensor, Fingerprint)>>,
    /// The leaves that stand for inputs in forwards whose graph lives on, by identity, with block and input: something
    /// computed from them left the body by another way than its outputs.
    pub(crate) escaped: RefCell<HashMap<usize, Escaped>>,
    /// The one CUDA device of the rollout, once a tensor on it was seen.
    pub(crate) cuda: Cell<Option<Device>>,
    pub(crate) watch: Watch,
    pub(crate) rng_states: RngStates,
    pub(crate) kept: KeptGraphs,
    /// The panic hook has been made silent about bodies that end early.
    pub(crate) quiet: Cell<bool>,
    /// Blocks whose forwards take gradients of their own, for which tensors are needed that a tape would drop.
    pub(crate) unrecorded: RefCell<HashSet<Arc<str>>>,
    /// Of sharded stores.
    pub(crate) windows: Windows<'m>,
    stores: Vec<&'m dyn Store>,
    table: RefCell<HashMap<u64, Entry<'m>>>,
    next_entry: Cell<u64>,
    running: RefCell<Vec<(Pass, Contexts<'m>)>>,
    failure: RefCell<Option<Failure>>,
    this: Weak<Self>,
}

impl<'m> State<'m> {
    pub(crate) fn new(stores: Vec<&'m dyn Store>, options: Options) -> Rc<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        Rc::new_cyclic(|this| Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            options,
            saved: SavedInputs::default(),
            graveyard: Arc::default(),
            ledger: RefCell::default(),
            captured: RefCell::default(),
            inner_captured: RefCell::default(),
            escaped: RefCell::default(),
            cuda: Cell::new(None),
            watch: Watch::default(),
            rng_states: RngStates::default(),
            kept: KeptGraphs::default(),
            quiet: Cell::new(false),
            unrecorded: RefCell::default(),
            windows: Windows::new(&stores, options.accumulate),
            stores,
            table: RefCell::default(),
            next_entry: Cell::new(0),
            running: RefCell::default(),
            failure: RefCell::new(None),
            this: Weak::clone(this),
        })
    }

    /// A counted handle, for a nested block's rollout.
    pub(crate) fn handle(&self) -> Rc<Self> {
        self.this.upgrade().expect("a state in use is owned by a rollout")
    }

    /// The variables as they are now.
    pub(crate) fn snapshot(&self) -> Result<Rc<Snapshot>, ShimError> {
        self.watch.snapshot(&self.stores, !self.running.borrow().is_empty())
    }

    /// Every variable that may get a gradient, as the stores have them now: the trainable ones, also while they are
    /// frozen, and those that require grad by the user's own doing.
    pub(crate) fn trainable(&self) -> impl Iterator<Item = Tensor> {
        self.stores.iter().flat_map(|store| {
            let trainable = store.trainable();
            let known: HashSet<_> = trainable.iter().map(ffi::identity).collect();
            let others = store.named().into_iter().map(|(_, variable)| variable);
            let others = others.filter(move |other| {
                other.defined() && other.requires_grad() && !known.contains(&ffi::identity(other))
            });
            trainable.into_iter().chain(others)
        })
    }

    /// What a variable of the stores is called.
    pub(crate) fn name_of(&self, variable: &Tensor) -> Option<String> {
        let mut named = self.stores.iter().flat_map(|store| store.named());
        named.find(|(_, other)| ffi::identity(other) == ffi::identity(variable)).map(|(name, _)| name)
    }

    /// How many variables the stores have now.
    pub(crate) fn variable_count(&self) -> usize {
        store::count(&self.stores)
    }

    pub(crate) fn new_entry_number(&self) -> u64 {
        self.next_entry.replace(self.next_entry.get() + 1)
    }

    pub(crate) fn insert(&self, entry: Entry<'m>) {
        self.windows.recorded(entry.node.entry, &entry.label);
        self.table.borrow_mut().insert(entry.node.entry, entry);
    }

    pub(crate) fn remove(&self, number: u64) -> Option<Entry<'m>> {
        let entry = self.take(number);
        if let Some(recorded) = entry.as_ref().and_then(|entry| entry.recorded.as_ref()) {
            self.forget_recorded(number, recorded);
        }
        entry
    }

    /// The entries with recorded graphs.
    pub(crate) fn recorded_infos(&self) -> Vec<(u64, ffi::TapeInfo)> {
        let table = self.table.borrow();
        let recorded = table.iter().filter_map(|(number, entry)| Some((*number, entry.recorded.as_ref()?.tape.info())));
        recorded.collect()
    }

    /// Entry `number` leaves the table with `recorded`.
    pub(crate) fn forget_recorded(&self, number: u64, recorded: &Recorded) {
        self.kept.remove(number);
        self.forget_leaves(recorded);
    }

    /// Its leaves have lived on for its own sake, which is over.
    pub(crate) fn forget_leaves(&self, recorded: &Recorded) {
        let mut escaped = self.escaped.borrow_mut();
        for leaf in &recorded.leaves {
            escaped.remove(leaf);
        }
    }

    /// Takes an entry out that goes back, or whose rollout ends.
    pub(crate) fn take(&self, number: u64) -> Option<Entry<'m>> {
        self.windows.gone(number);
        self.table.borrow_mut().remove(&number)
    }

    /// What `change` makes of entry `number`; it must not drop closures or contexts, which run user code then.
    pub(crate) fn with_entry<T>(&self, number: u64, change: impl FnOnce(&mut Entry<'m>) -> T) -> Option<T> {
        self.table.borrow_mut().get_mut(&number).map(change)
    }

    /// Drops the entries of nodes that died.
    ///
    /// Entries own closures, and a closure's captures run user code when they are dropped: never while the table
    /// is borrowed.
    pub(crate) fn sweep(&self) {
        let dead: Vec<_> = self.graveyard.sweep().into_iter().map(|number| self.remove(number)).collect();
        drop(dead);
    }

    /// Drops all entries and frees what live nodes still keep.
    pub(crate) fn clear(&self) {
        let table = self.table.take();
        for entry in table.values() {
            drop(entry.node.take_saved());
        }
        drop(table);
        self.saved.clear();
        self.captured.take();
        self.inner_captured.take();
        self.escaped.take();
        self.watch.clear();
        self.windows.close();
    }

    /// Notes that a body runs in `pass`, inside `contexts`, until the guard is dropped.
    pub(crate) fn enter(&self, pass: Pass, contexts: Contexts<'m>) -> PassGuard<'_, 'm> {
        self.running.borrow_mut().push((pass, contexts));
        PassGuard(self)
    }

    /// The contexts that are open around the caller.
    pub(crate) fn open_contexts(&self) -> Contexts<'m> {
        self.running.borrow().last().map(|(_, contexts)| contexts.clone()).unwrap_or_default()
    }

    /// Whether the caller is the body of a block in its forward, whose graph is about to be dropped.
    pub(crate) fn inside_forward(&self) -> bool {
        self.running.borrow().last().is_some_and(|(pass, _)| *pass == Pass::Forward)
    }

    /// A gradient that is taken through the tensor would end at the leaf of a block's input.
    pub(crate) fn check_not_escaped(&self, identity: usize) -> Result<(), ReplayError> {
        match self.escaped.borrow().get(&identity) {
            Some(Escaped { block, input, .. }) => {
                Err(ReplayError::Escaped { block: block.to_string(), input: input.clone() })
            }
            None => Ok(()),
        }
    }

    /// Keeps the first reason: what follows from it says less.
    pub(crate) fn fail(&self, failure: Failure) {
        self.failure.borrow_mut().get_or_insert(failure);
    }

    pub(crate) fn take_failure(&self) -> Option<Failure> {
        self.failure.take()
    }
}

pub(crate) struct PassGuard<'s, 'm>(&'s State<'m>);

impl Drop for PassGuard<'_, '_> {
    fn drop(&mut self) {
        // Contexts may run user code when they are dropped: not while the list is borrowed.
        let ended = self.0.running.borrow_mut().pop();
        drop(ended);
    }
}
