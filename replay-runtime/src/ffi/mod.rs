//! The only unsafe code of the project: declarations of the C++ shim (`cpp/`) and safe wrappers around them.
//!
//! What holds for every call: a `*const C_tensor` passed in is borrowed for the call; a pointer that comes out is
//! a new C++ tensor that the wrapper takes over at once; no C++ exception leaves the shim, and no Rust panic
//! leaves a callback.

mod group;
mod live;
mod node;
mod optim;
mod print;
mod rng;
mod saved;
mod state;
mod sys;
mod tape;
mod tensor;

pub(crate) use group::{Group, GroupStore, Works};
pub(crate) use live::{count_live_bytes, live_bytes, live_peak, reset_live_peak};
pub(crate) use node::{
    Graveyard, NodeState, Replayed, Replayer, attach, backward, barrier, graph, graph_since, refuse_grad, sequence,
};
pub(crate) use optim::{OptimizerKind, OptimizerOptions, RawOptimizer, Setting};
pub(crate) use print::{Fingerprint, TensorList, differing, fingerprint, keeps_values, put_values, same_bits};
pub(crate) use rng::{
    DrawLock, DrawWatch, GeneratorState, generator_bytes, register_thread, set_generator_bytes, several_threads,
};
pub(crate) use saved::{SavedTensor, WeakTensor};
#[cfg(test)]
pub(crate) use state::InferenceGuard;
pub(crate) use state::{
    Modes, autocast_clear_cache, autocast_end_beyond, autocast_enter, autocast_leave, autocast_nesting, has_cuda,
    inference_mode, library_version, load_library,
};
pub(crate) use tape::{RecordedGraph, StorageSet, Tape, TapeInfo, Use, cover_panic_hook, pause_tapes};
pub(crate) use tensor::{
    add_grad, copy, counter, detach_output, grad, identity, nbytes, owns_storage, set_grad, storage, storage_nbytes,
    take_grad,
};

use std::ffi::{CStr, CString, c_int};

/// A failure that the shim reported: its code, the text without LibTorch's C++ backtrace, and the text with it.
#[derive(Debug)]
pub(crate) struct ShimError {
    pub(crate) code: Code,
    pub(crate) brief: String,
    pub(crate) full: String,
}

impl ShimError {
    /// A refusal of our own, which the shim is not asked about.
    pub(crate) fn refused(text: String) -> Self {
        Self { code: Code::Exception, full: text.clone(), brief: text }
    }
}

/// The shim's answers, `enum Code` in `cpp/guard.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    Exception,
    ForeignBackward,
    OtherRollout,
    Thread,
    Used,
    Callback,
    Captured,
    Escaped,
    Mismatch,
}

impl Code {
    fn from_raw(code: c_int) -> Self {
        match code {
            2 => Self::ForeignBackward,
            3 => Self::OtherRollout,
            4 => Self::Thread,
            5 => Self::Used,
            6 => Self::Callback,
            7 => Self::Captured,
            8 => Self::Escaped,
            9 => Self::Mismatch,
            _ => Self::Exception,
        }
    }
}

/// A text that names or says something. A zero byte in it would end it for C++.
fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).expect("no zero byte is left")
}

/// Turns an answer of the shim into a `Result`, taking the text that belongs to it.
fn check(code: c_int) -> Result<(), ShimError> {
    if code == 0 {
        return Ok(());
    }
    let text = |full| {
        // SAFETY: the pointer is never null, the text is NUL-terminated, and it belongs to this thread, which
        // copies it before it calls the shim again.
        unsafe { CStr::from_ptr(sys::replay_last_error(full)) }.to_string_lossy().into_owned()
    };
    Err(ShimError { code: Code::from_raw(code), brief: text(0), full: text(1) })
}
