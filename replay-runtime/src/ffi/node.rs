//! The autograd node as Rust sees it: what it keeps, how the engine reaches a rollout through it, and the two
//! backward passes, of a whole rollout and of one replayed block.

use std::any::Any;
use std::ffi::{CString, c_int, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;
use torch_sys::C_tensor;

use super::sys::{self, CEdges, CScope, NodeCallbacks};
use super::tensor::{into_raw, raw, raw_options};
use super::{SavedTensor, ShimError, check};

/// Where nodes that died leave their numbers, from whatever thread, for their rollout to sweep.
#[derive(Debug, Default)]
pub(crate) struct Graveyard(Mutex<Vec<u64>>);

impl Graveyard {
    /// The numbers since the last call.
    pub(crate) fn sweep(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a node keeps: a number in its rollout's table and the saved inputs. It may die on any thread, late, so
/// nothing in it belongs to a thread or borrows from the model.
#[derive(Debug)]
pub(crate) struct NodeState {
    /// The number of the block's entry in the rollout's table.
    pub(crate) entry: u64,
    /// The block's name, for messages.
    pub(crate) block: Arc<str>,
    saved: Mutex<Option<Vec<Option<Arc<SavedTensor>>>>>,
    graveyard: Arc<Graveyard>,
}

impl NodeState {
    pub(crate) fn new(
        entry: u64,
        block: Arc<str>,
        saved: Vec<Option<Arc<SavedTensor>>>,
        graveyard: Arc<Graveyard>,
    ) -> Self {
        Self { entry, block, saved: Mutex::new(Some(saved)), graveyard }
    }

    /// Takes the saved inputs out; `None` when that was done before.
    pub(crate) fn take_saved(&self) -> Option<Vec<Option<Arc<SavedTensor>>>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What the engine calls for each node of a rollout. Implemented by the rollout's state.
pub(crate) trait Replayer {
    /// Replays the block of `node` and differentiates it. Returns the gradients of its inputs, or `None` when it
    /// failed and has kept the reason.
    fn replay(&self, node: &NodeState, scope: Scope<'_>, grads: Vec<Option<Tensor>>) -> Option<Vec<Option<Tensor>>>;

    /// Keeps the payload of a panic that `replay` let through.
    fn panicked(&self, payload: Box<dyn Any + Send>);
}

/// A replay under way.
#[derive(Clone, Copy)]
pub(crate) struct Scope<'s>(*const CScope, PhantomData<&'s ()>);

impl Scope<'_> {
    /// Differentiates `roots` with the gradients `grads`; those of leaves are accumulated into their `.grad`. The
    /// roots are dropped before the pass starts.
    pub(crate) fn differentiate(self, roots: Vec<Tensor>, grads: &[Tensor]) -> Result<(), ShimError> {
        let edges = Edges::new(&roots)?;
        drop(roots);
        let grads = raw(grads);
        // SAFETY: the scope lives while the callback it was handed to runs, which `'s` does not outlive; edges and
        // gradients live until the call returns.
        check(unsafe { sys::replay_differentiate(self.0, edges.0.as_ptr(), grads.as_ptr(), grads.len()) })
    }
}

/// Where gradients enter a graph.
struct Edges(NonNull<CEdges>);

impl Edges {
    fn new(roots: &[Tensor]) -> Result<Self, ShimError> {
        let roots = raw(roots);
        let mut out = ptr::null_mut();
        // SAFETY: the tensors are borrowed for the call; `out` receives an object that only we own.
        check(unsafe { sys::replay_edges_new(roots.as_ptr(), roots.len(), &raw mut out) })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without an object")))
    }
}

impl Drop for Edges {
    fn drop(&mut self) {
        // SAFETY: made by `replay_edges_new`, owned by `self` alone, freed once.
        unsafe { sys::replay_edges_free(self.0.as_ptr()) }
    }
}

static CALLBACKS: NodeCallbacks = NodeCallbacks { run, release, drop: drop_state };

/// Puts a node before `outputs`, with edges to those of `inputs` that require grad.
pub(crate) fn attach(
    rollout: u64,
    state: &Arc<NodeState>,
    inputs: &[Option<&Tensor>],
    outputs: &[&Tensor],
) -> Result<(), ShimError> {
    let block = CString::new(state.block.replace('\0', " ")).unwrap_or_default();
    let inputs = raw_options(inputs.iter().copied());
    let outputs = raw(outputs.iter().copied());
    let state = Arc::into_raw(Arc::clone(state)).cast::<c_void>();
    // SAFETY: tensors and name are borrowed for the call. The node takes one count of the `Arc` and gives it back
    // through `drop_state`, also when the call fails. The callbacks are static.
    check(unsafe {
        sys::replay_attach(
            rollout,
            block.as_ptr(),
            state,
            &raw const CALLBACKS,
            inputs.as_ptr(),
            inputs.len(),
            outputs.as_ptr(),
            outputs.len(),
        )
    })
}

/// Gives `outputs` a history that leads nowhere.
pub(crate) fn barrier(outputs: &[&Tensor]) -> Result<(), ShimError> {
    let outputs = raw(outputs.iter().copied());
    // SAFETY: the tensors are borrowed for the call.
    check(unsafe { sys::replay_barrier(outputs.as_ptr(), outputs.len()) })
}

/// `loss.backward()` in the name of `rollout`, each of whose nodes calls `replayer`.
pub(crate) fn backward(rollout: u64, replayer: &dyn Replayer, loss: &Tensor) -> Result<(), ShimError> {
    let handle: *const &dyn Replayer = &raw const replayer;
    // SAFETY: the shim hands `handle` to callbacks only before this call returns (it waits for those on other
    // threads), so `replayer` outlives its uses.
    check(unsafe { sys::replay_backward(rollout, handle.cast(), loss.as_ptr()) })
}

/// `kAnyAge` in `cpp/node.h`.
const ANY_AGE: u64 = u64::MAX;

/// The leaves that the graphs of `roots` accumulate into, by identity, each once.
pub(crate) fn leaves<'t>(roots: impl IntoIterator<Item = &'t Tensor>) -> Result<Vec<(usize, Tensor)>, ShimError> {
    walk(&raw(roots), ANY_AGE)
}

/// The number that the next node made on this thread will get; for [`captured_leaves`].
pub(crate) fn sequence() -> u64 {
    // SAFETY: reads a thread-local counter.
    unsafe { sys::replay_sequence() }
}

/// [`leaves`], and an error with [`Code::Captured`](super::Code::Captured) and the name of the node when a graph
/// reaches one that was made before `since` or on another thread.
pub(crate) fn captured_leaves<'t>(
    roots: impl IntoIterator<Item = &'t Tensor>,
    since: u64,
) -> Result<Vec<(usize, Tensor)>, ShimError> {
    walk(&raw(roots), since)
}

fn walk(roots: &[*const C_tensor], since: u64) -> Result<Vec<(usize, Tensor)>, ShimError> {
    extern "C" fn visit(context: *mut c_void, identity: usize, variable: *const C_tensor) {
        // SAFETY: `context` is the vector below, which nobody else uses during the walk; `variable` is borrowed
        // for this call and copied by its count. Nothing here unwinds but running out of memory, which aborts.
        unsafe {
            let found = &mut *context.cast::<Vec<(usize, Tensor)>>();
            found.push((identity, Tensor::clone_from_ptr(variable.cast_mut())));
        }
    }
    let mut found: Vec<(usize, Tensor)> = Vec::new();
    // SAFETY: the roots are borrowed for the call, and `visit` gets the vector only while it runs.
    check(unsafe { sys::replay_leaves(roots.as_ptr(), roots.len(), since, visit, (&raw mut found).cast()) })?;
    Ok(found)
}

extern "C" fn run(
    replayer: *const c_void,
    node_state: *const c_void,
    scope: *const CScope,
    grads: *const *const C_tensor,
    n_grads: usize,
    input_grads: *mut *mut C_tensor,
    n_inputs: usize,
) -> c_int {
    // SAFETY: `replayer` is the handle of `backward` above, alive until that call returns; only one thread at a
    // time gets here for it (the shim's busy check), while the rollout's own thread waits. `node_state` is kept
    // alive by the node that is running. The arrays are the shim's, with the lengths given.
    let (replayer, node, grads, input_grads) = unsafe {
        (
            *replayer.cast::<&dyn Replayer>(),
            &*node_state.cast::<NodeState>(),
            std::slice::from_raw_parts(grads, n_grads),
            std::slice::from_raw_parts_mut(input_grads, n_inputs),
        )
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let grads = grads
            .iter()
            // SAFETY: null or borrowed for this call; copied by its count.
            .map(|&grad| (!grad.is_null()).then(|| unsafe { Tensor::clone_from_ptr(grad.cast_mut()) }))
            .collect();
        replayer.replay(node, Scope(scope, PhantomData), grads)
    }));
    match outcome {
        Ok(Some(made)) => {
            for (slot, grad) in input_grads.iter_mut().zip(made) {
                *slot = grad.map_or(ptr::null_mut(), into_raw);
            }
            0
        }
        Ok(None) => 1,
        Err(payload) => {
            replayer.panicked(payload);
            1
        }
    }
}

extern "C" fn release(node_state: *const c_void) {
    // SAFETY: kept alive by the node that calls.
    let node = unsafe { &*node_state.cast::<NodeState>() };
    drop(node.take_saved());
}

extern "C" fn drop_state(node_state: *const c_void) {
    // SAFETY: the count that `attach` gave to the node, given back once, by its destructor.
    let node = unsafe { Arc::from_raw(node_state.cast::<NodeState>()) };
    drop(node.take_saved());
    let mut graveyard = node.graveyard.0.lock().unwrap_or_else(PoisonError::into_inner);
    graveyard.push(node.entry);
}
