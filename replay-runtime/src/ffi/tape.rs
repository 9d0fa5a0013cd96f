//! What a block's graph has saved, and that graph between forward and replay; `cpp/engine.h`, `cpp/tape.h`, `cpp/recorded_graph.h`.

use std::ffi::{CString, c_int};
use std::marker::PhantomData;
use std::panic::{self, PanicHookInfo};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tch::{Device, Tensor};

use super::sys::{self, CGraph, CStorageSet, CTape};
use super::tensor::{raw, raw_options};
use super::{ShimError, check};

/// The storages of a rollout's variables.
#[derive(Debug)]
pub(crate) struct StorageSet(NonNull<CStorageSet>);

impl StorageSet {
    pub(crate) fn new<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<Self, ShimError> {
        let tensors = raw(tensors);
        let mut out = ptr::null_mut();
        // SAFETY: the tensors are borrowed for the call; only addresses are kept of them.
        check(unsafe { sys::replay_storage_set_new(tensors.as_ptr(), tensors.len(), &raw mut out) })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without a set")))
    }
}

impl Drop for StorageSet {
    fn drop(&mut self) {
        // SAFETY: made by `replay_storage_set_new` and freed once; tapes hold the set by counts of their own.
        unsafe { sys::replay_storage_set_free(self.0.as_ptr()) }
    }
}

/// `struct TapeInfo` in `cpp/tape.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TapeInfo {
    pub(crate) usable: bool,
    pub(crate) abandoned: bool,
    pub(crate) intact: bool,
    pub(crate) filled: bool,
    pub(crate) stopped: bool,
    pub(crate) generators_agree: bool,
    pub(crate) bytes: u64,
    pub(crate) graph_bytes: u64,
    pub(crate) first_node: u64,
    pub(crate) end_node: u64,
}

/// What is done with the tensors that operations save, while a body runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// In a forward; each tensor is dropped at once if it `drops`.
    Record { drops: bool },
    /// In a replay; the body ends with the last one if it `unwinds`.
    Refill { unwinds: bool },
}

/// The tensors that one block's graph has saved.
#[derive(Debug)]
pub(crate) struct Tape(NonNull<CTape>);

impl Tape {
    /// Whether LibTorch's engine is one that knows tapes.
    pub(crate) fn available() -> bool {
        extern "C" fn may_unwind() -> c_int {
            c_int::from(!std::thread::panicking())
        }
        static AVAILABLE: AtomicBool = AtomicBool::new(false);
        // Another library may have taken its place meanwhile, so the answer is not kept; only that it was installed.
        if !AVAILABLE.load(Ordering::Acquire) {
            // SAFETY: the callback is static, reads a thread-local of the standard library and does not unwind.
            let installed = unsafe { sys::replay_tape_install(may_unwind) } != 0;
            AVAILABLE.store(installed, Ordering::Release);
            return installed;
        }
        true
    }

    pub(crate) fn new(
        block: &str,
        inputs: &[Option<&Tensor>],
        variables: &StorageSet,
        cuda: Option<Device>,
    ) -> Result<Self, ShimError> {
        let block = CString::new(block.replace('\0', " ")).unwrap_or_default();
        let inputs = raw_options(inputs.iter().copied());
        let cuda = match cuda {
            Some(Device::Cuda(index)) => c_int::try_from(index).unwrap_or(-1),
            _ => -1,
        };
        let mut out = ptr::null_mut();
        // SAFETY: name and tensors are borrowed for the call, the set is shared by its own count.
        check(unsafe {
            let (inputs, count) = (inputs.as_ptr(), inputs.len());
            sys::replay_tape_new(block.as_ptr(), inputs, count, variables.0.as_ptr(), cuda, &raw mut out)
        })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without a tape")))
    }

    /// Until the guard is dropped, this tape follows what is saved on this thread.
    pub(crate) fn enter(&self, what: Use) -> Result<TapeGuard, ShimError> {
        let what = match what {
            Use::Record { drops: false } => 0,
            Use::Record { drops: true } => 3,
            Use::Refill { unwinds: false } => 1,
            Use::Refill { unwinds: true } => 2,
        };
        // SAFETY: C++ shares the tape by its own count.
        check(unsafe { sys::replay_tape_enter(self.0.as_ptr(), what) })?;
        Ok(TapeGuard(PhantomData))
    }

    pub(crate) fn info(&self) -> TapeInfo {
        let mut out = TapeInfo::default();
        // SAFETY: as above; `out` has the layout of the C++ struct, and C++ writes 0 or 1 to each `bool`.
        unsafe { sys::replay_tape_info(self.0.as_ptr(), &raw mut out) };
        out
    }

    /// An error with [`Code::Mismatch`](super::Code::Mismatch) where the replay did not save what its forward did.
    pub(crate) fn check_refilled(&self) -> Result<(), ShimError> {
        // SAFETY: as above.
        check(unsafe { sys::replay_tape_check(self.0.as_ptr()) })
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        // SAFETY: made by `replay_tape_new` and freed once; the graph holds the tape by counts of its own.
        unsafe { sys::replay_tape_free(self.0.as_ptr()) }
    }
}

/// Nothing is recorded on this thread until the guard is dropped, and a tape around it cannot be used: it does not follow
/// blocks inside.
pub(crate) fn pause_tapes() -> Result<TapeGuard, ShimError> {
    // SAFETY: a null tape is allowed.
    check(unsafe { sys::replay_tape_enter(ptr::null(), 0) })?;
    Ok(TapeGuard(PhantomData))
}

/// Belongs to its thread, and ends innermost first.
pub(crate) struct TapeGuard(PhantomData<*const ()>);

impl Drop for TapeGuard {
    fn drop(&mut self) {
        // SAFETY: entered on this thread, and not left yet.
        unsafe { sys::replay_tape_leave() }
    }
}

/// Whether this thread unwinds because of its tape.
fn stopping() -> bool {
    // SAFETY: reads a thread-local.
    unsafe { sys::replay_tape_stopping() != 0 }
}

type Hook = dyn Fn(&PanicHookInfo<'_>) + Send + Sync;

/// Makes the panic hook silent about panics by which bodies end for the runtime's sake. Whatever hook is set stays behind
/// it; one that was set since the last call is covered too. Does nothing on a thread that panics.
pub(crate) fn cover_panic_hook() {
    static OURS: Mutex<Option<usize>> = Mutex::new(None);
    if std::thread::panicking() {
        return;
    }
    let address = |hook: &Hook| ptr::from_ref(hook).cast::<()>().addr();
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = panic::take_hook();
    if *ours == Some(address(&*found)) {
        panic::set_hook(found);
        return;
    }
    let covered: Box<Hook> = Box::new(move |info| {
        if !stopping() {
            found(info);
        }
    });
    *ours = Some(address(&*covered));
    panic::set_hook(covered);
}

/// A block's graph, from the edges of its outputs to the leaves of its inputs.
#[derive(Debug)]
pub(crate) struct RecordedGraph(NonNull<CGraph>);

impl RecordedGraph {
    /// `outputs` require grad, and have the history that `tape` recorded down to `leaves`, which take no gradient from now on
    /// but in passes through this graph.
    pub(crate) fn new<'t>(
        tape: &Tape,
        rollout: u64,
        block: &str,
        outputs: impl IntoIterator<Item = &'t Tensor>,
        leaves: &[Option<Tensor>],
    ) -> Result<Self, ShimError> {
        let block = CString::new(block.replace('\0', " ")).unwrap_or_default();
        let outputs = raw(outputs);
        let leaves = raw_options(leaves.iter().map(|leaf| leaf.as_ref().filter(|leaf| leaf.requires_grad())));
        let mut out = ptr::null_mut();
        // SAFETY: name and tensors are borrowed for the call; of the outputs only their edges are kept.
        check(unsafe {
            sys::replay_graph_new(
                tape.0.as_ptr(),
                rollout,
                block.as_ptr(),
                outputs.as_ptr(),
                outputs.len(),
                leaves.as_ptr(),
                leaves.len(),
                &raw mut out,
            )
        })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without a graph")))
    }

    /// The forward is over, and what only it needed is gone: counts what was saved, and lets go of inputs that nobody else
    /// holds.
    pub(crate) fn end_record(&self) -> Result<(), ShimError> {
        // SAFETY: as for `drop_tensors`.
        check(unsafe { sys::replay_graph_end_record(self.0.as_ptr()) })
    }

    /// Drops what was saved, and inputs that nobody else holds; a replay brings it again.
    pub(crate) fn drop_tensors(&self) -> Result<(), ShimError> {
        // SAFETY: the graph lives as long as `self`, which belongs to one thread.
        check(unsafe { sys::replay_graph_drop_tensors(self.0.as_ptr()) })
    }

    /// Hands the C++ object over.
    pub(super) fn into_raw(self) -> *mut CGraph {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }
}

impl Drop for RecordedGraph {
    fn drop(&mut self) {
        // SAFETY: made by `replay_graph_new`, and freed once, since `into_raw` forgets `self`.
        unsafe { sys::replay_graph_free(self.0.as_ptr()) }
    }
}
