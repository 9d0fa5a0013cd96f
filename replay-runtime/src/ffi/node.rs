//! The autograd node as Rust sees it: what it keeps, how the engine reaches a rollout through it, and the two
//! backward passes, of a whole rollout and of one replayed block.

use std::any::Any;
use std::ffi::{CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::sys::{self, CReplayed, NodeCallbacks};
use super::tensor::{raw, raw_options};
use super::{RecordedGraph, SavedTensor, ShimError, check};

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

    /// The saved inputs, which stay; `None` when they were taken out.
    pub(crate) fn saved(&self) -> Option<Vec<Option<Arc<SavedTensor>>>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts others in their place, unless they were taken out.
    pub(crate) fn put_saved(&self, saved: Vec<Option<Arc<SavedTensor>>>) {
        let mut slot = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let old = slot.as_mut().map(|slot| std::mem::replace(slot, saved));
        drop(slot);
        drop(old);
    }

    /// Takes the saved inputs out; `None` when that was done before.
    pub(crate) fn take_saved(&self) -> Option<Vec<Option<Arc<SavedTensor>>>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What the engine calls for each node of a rollout, on the thread that called [`backward`] and before that call
/// returns. Implemented by the rollout's state.
pub(crate) trait Replayer {
    /// Runs the block of `node` again and fills `out`. `None`: it failed, and the reason is kept.
    fn replay(&self, node: &NodeState, grads: &[Option<Tensor>], out: &mut Replayed) -> Option<()>;

    /// The block of `node` was differentiated.
    fn finished(&self, node: &NodeState, time: Duration);

    /// Keeps the payload of a panic that one of the others let through.
    fn panicked(&self, payload: Box<dyn Any + Send>);
}

/// What a replayed block hands back to be differentiated.
pub(crate) struct Replayed(NonNull<CReplayed>);

impl Replayed {
    /// An output with the gradient that arrived for it. The output itself is not kept.
    pub(crate) fn push_root(&mut self, root: &Tensor, grad: &Tensor) -> Result<(), ShimError> {
        // SAFETY: the object outlives the callback that it was handed to, and so `self`; the tensors are borrowed.
        check(unsafe { sys::replay_push_root(self.0.as_ptr(), root.as_ptr(), grad.as_ptr()) })
    }

    /// The leaf that stands for input `index`, whose gradient is that input's.
    pub(crate) fn push_leaf(&mut self, index: usize, leaf: &Tensor) -> Result<(), ShimError> {
        // SAFETY: as for `push_root`.
        check(unsafe { sys::replay_push_leaf(self.0.as_ptr(), index, leaf.as_ptr()) })
    }
}

impl Replayed {
    /// The forward's own graph in place of one that the replay has built, with the gradients of its outputs.
    pub(crate) fn push_graph(&mut self, graph: RecordedGraph, grads: &[Option<Tensor>]) -> Result<(), ShimError> {
        let grads = raw_options(grads.iter().map(Option::as_ref));
        // SAFETY: as for `push_root`; C++ takes the graph over, also when it fails.
        check(unsafe { sys::replay_push_graph(self.0.as_ptr(), graph.into_raw(), grads.as_ptr(), grads.len()) })
    }
}

static CALLBACKS: NodeCallbacks = NodeCallbacks { run, finished, release, drop: drop_state };

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

/// Gives `outputs` a history that leads to `inputs` and cannot be differentiated.
pub(crate) fn barrier(inputs: &[Option<&Tensor>], outputs: &[&Tensor]) -> Result<(), ShimError> {
    let inputs = raw_options(inputs.iter().copied());
    let outputs = raw(outputs.iter().copied());
    // SAFETY: the tensors are borrowed for the call.
    check(unsafe { sys::replay_barrier(inputs.as_ptr(), inputs.len(), outputs.as_ptr(), outputs.len()) })
}

/// Makes every backward pass that comes to `leaf` fail with `why`.
pub(crate) fn refuse_grad(leaf: &Tensor, why: &str) -> Result<(), ShimError> {
    let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
    // SAFETY: both are borrowed for the call; C++ copies the text.
    check(unsafe { sys::replay_refuse_grad(leaf.as_ptr(), why.as_ptr()) })
}

/// `loss.backward()` in the name of `rollout`, each of whose nodes calls `replayer`; it may accumulate into `leaves`, in
/// `kind`, which is Float or Double and at least as wide as theirs. How many bytes of gradients were copied.
pub(crate) fn backward(
    rollout: u64,
    replayer: &dyn Replayer,
    loss: &Tensor,
    leaves: &[Tensor],
    kind: Option<Kind>,
) -> Result<u64, ShimError> {
    let handle: *const &dyn Replayer = &raw const replayer;
    let leaves = raw(leaves);
    let mut copied = 0;
    // As in `c10::ScalarType`.
    let kind = match kind {
        None => -1,
        Some(Kind::Double) => 7,
        Some(_) => 6,
    };
    // SAFETY: the shim hands `handle` to callbacks on this thread only, and only before this call returns, so
    // `replayer` outlives its uses and never meets another thread. The tensors are borrowed for the call.
    check(unsafe {
        let (leaves, n_leaves) = (leaves.as_ptr(), leaves.len());
        sys::replay_backward(rollout, handle.cast(), loss.as_ptr(), leaves, n_leaves, kind, &raw mut copied)
    })?;
    Ok(copied)
}

/// `kAnyAge` in `cpp/walk.h`.
const ANY_AGE: u64 = u64::MAX;

/// What a walk over graphs finds.
pub(crate) struct Graph {
    /// The leaves that they accumulate into, by identity, each once.
    pub(crate) leaves: Vec<(usize, Tensor)>,
    /// A CUDA device on which they compute.
    pub(crate) cuda: Option<Device>,
    /// For each of the spans, whether a node was made in it.
    pub(crate) touched: Vec<bool>,
}

/// Follows the graphs of `roots`. `spans` are ascending ranges of the numbers of this thread's nodes.
pub(crate) fn graph<'t>(roots: impl IntoIterator<Item = &'t Tensor>, spans: &[[u64; 2]]) -> Result<Graph, ShimError> {
    walk(&raw(roots), ANY_AGE, &|_| false, spans)
}

/// The number that the next node made on this thread will get; for [`graph_since`].
pub(crate) fn sequence() -> u64 {
    // SAFETY: reads a thread-local counter.
    unsafe { sys::replay_sequence() }
}

/// [`graph`], and an error with [`Code::Captured`](super::Code::Captured) and the name of the node when a graph
/// reaches one that this thread made before `since`. Leaves that are `known`, by identity, are left out.
pub(crate) fn graph_since<'t>(
    roots: impl IntoIterator<Item = &'t Tensor>,
    since: u64,
    known: &dyn Fn(usize) -> bool,
) -> Result<Graph, ShimError> {
    walk(&raw(roots), since, known, &[])
}

struct Walk<'k> {
    leaves: Vec<(usize, Tensor)>,
    known: &'k dyn Fn(usize) -> bool,
}

fn walk(
    roots: &[*const C_tensor],
    since: u64,
    known: &dyn Fn(usize) -> bool,
    spans: &[[u64; 2]],
) -> Result<Graph, ShimError> {
    extern "C" fn visit(context: *mut c_void, identity: usize, variable: *const C_tensor) {
        // SAFETY: `context` is the object below, which nobody else uses during the walk; `variable` is borrowed
        // for this call and copied by its count. Nothing here unwinds: `known` searches lists, and running out of
        // memory aborts, as a panic would, which does not leave an `extern "C"` function.
        unsafe {
            let walk = &mut *context.cast::<Walk<'_>>();
            if !(walk.known)(identity) {
                walk.leaves.push((identity, Tensor::clone_from_ptr(variable.cast_mut())));
            }
        }
    }
    let mut walk = Walk { leaves: Vec::new(), known };
    let mut cuda: c_int = -1;
    let mut touched = vec![0u8; spans.len()];
    // SAFETY: roots and spans are borrowed for the call, `touched` has a place for each span, and `visit` gets the object
    // only while it runs.
    check(unsafe {
        let context = (&raw mut walk).cast();
        let (bounds, places) = (spans.as_ptr().cast(), touched.as_mut_ptr());
        sys::replay_leaves(
            roots.as_ptr(),
            roots.len(),
            since,
            visit,
            context,
            &raw mut cuda,
            bounds,
            spans.len(),
            places,
        )
    })?;
    let cuda = usize::try_from(cuda).ok().map(Device::Cuda);
    Ok(Graph { leaves: walk.leaves, cuda, touched: touched.into_iter().map(|place| place != 0).collect() })
}

extern "C" fn run(
    replayer: *const c_void,
    node_state: *const c_void,
    grads: *const *const C_tensor,
    n_grads: usize,
    out: *mut CReplayed,
) -> c_int {
    // SAFETY: `replayer` is the handle of `backward` above, whose caller is this thread and waits. `node_state` is kept
    // alive by the node that is running. The array is the shim's, with the length given, its items null or borrowed
    // for this call; they are copied by their count. `out` is the shim's and ours alone until this returns.
    let (replayer, node, grads, mut out) = unsafe {
        let grads: &[*const C_tensor] = if n_grads == 0 { &[] } else { std::slice::from_raw_parts(grads, n_grads) };
        (
            *replayer.cast::<&dyn Replayer>(),
            &*node_state.cast::<NodeState>(),
            grads,
            Replayed(NonNull::new_unchecked(out)),
        )
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as above.
        let grad = |&grad: &*const C_tensor| unsafe { Tensor::clone_from_ptr(grad.cast_mut()) };
        let grads: Vec<_> = grads.iter().map(|raw| (!raw.is_null()).then(|| grad(raw))).collect();
        replayer.replay(node, &grads, &mut out)
    }));
    match outcome {
        Ok(Some(())) => 0,
        Ok(None) => 1,
        Err(payload) => {
            replayer.panicked(payload);
            1
        }
    }
}

extern "C" fn finished(replayer: *const c_void, node_state: *const c_void, seconds: f64) {
    // SAFETY: as in `run`.
    let (replayer, node) = unsafe { (*replayer.cast::<&dyn Replayer>(), &*node_state.cast::<NodeState>()) };
    let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let outcome = catch_unwind(AssertUnwindSafe(|| replayer.finished(node, time)));
    if let Err(payload) = outcome {
        replayer.panicked(payload);
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
