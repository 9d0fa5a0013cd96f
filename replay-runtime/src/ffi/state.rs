//! Thread modes, and the library itself.

use std::ffi::{CStr, c_char, c_int};

use tch::Device;

use super::{ShimError, check, sys};

/// The modes that change what an operation computes; `struct Modes` in `cpp/state.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Modes {
    pub(crate) grad: bool,
    pub(crate) autocast_cpu: bool,
    pub(crate) autocast_cuda: bool,
    pub(crate) autocast_cache: bool,
    pub(crate) autocast_cpu_dtype: i8,
    pub(crate) autocast_cuda_dtype: i8,
    pub(crate) default_dtype: i8,
    pub(crate) deterministic: bool,
    pub(crate) deterministic_warn_only: bool,
    pub(crate) deterministic_fill: bool,
}

impl Modes {
    /// Those of this thread.
    pub(crate) fn current() -> Result<Self, ShimError> {
        let mut out = Self::default();
        // SAFETY: `out` has the layout of the C++ struct, and C++ writes 0 or 1 to each `bool`.
        check(unsafe { sys::replay_modes_get(&raw mut out) })?;
        Ok(out)
    }

    /// Makes them those of this thread.
    pub(crate) fn set(&self) -> Result<(), ShimError> {
        // SAFETY: reads the struct during the call.
        check(unsafe { sys::replay_modes_set(self) })
    }
}

/// Whether this thread is in inference mode.
pub(crate) fn inference_mode() -> bool {
    // SAFETY: reads a thread-local flag.
    unsafe { sys::replay_inference_mode() != 0 }
}

/// Inference mode on this thread while it lives; tch has no guard for it.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct InferenceGuard(std::ptr::NonNull<std::ffi::c_void>);

#[cfg(test)]
impl InferenceGuard {
    pub(crate) fn enter() -> Self {
        // SAFETY: sets a thread-local mode; the result is new.
        let raw = unsafe { sys::replay_inference_enter() };
        Self(std::ptr::NonNull::new(raw).expect("out of memory for a guard"))
    }
}

#[cfg(test)]
impl Drop for InferenceGuard {
    fn drop(&mut self) {
        // SAFETY: made by `replay_inference_enter` on this thread, since a `NonNull` is not `Send`; freed once.
        unsafe { sys::replay_inference_leave(self.0.as_ptr()) }
    }
}

/// LibTorch's number of a device's type, and its index.
pub(super) fn device_code(device: Device) -> (c_int, c_int) {
    match device {
        Device::Cuda(index) => (1, c_int::try_from(index).unwrap_or(c_int::MAX)),
        _ => (0, -1),
    }
}

pub(crate) fn autocast_enter(device: Device, enabled: bool, dtype: i8) -> Result<(), ShimError> {
    // SAFETY: plain numbers; LibTorch throws on those it does not know, and the shim catches.
    check(unsafe { sys::replay_autocast_enter(device_code(device).0, c_int::from(enabled), c_int::from(dtype)) })
}

pub(crate) fn autocast_leave(device: Device, enabled: bool, dtype: i8) -> Result<(), ShimError> {
    // SAFETY: as for `autocast_enter`.
    check(unsafe { sys::replay_autocast_leave(device_code(device).0, c_int::from(enabled), c_int::from(dtype)) })
}

/// How many scopes of autocast are open on this thread.
pub(crate) fn autocast_nesting() -> i32 {
    // SAFETY: reads a thread-local of LibTorch's, by counting up and down.
    unsafe { sys::replay_autocast_nesting() }
}

/// Ends the scopes beyond so many.
pub(crate) fn autocast_end_beyond(nesting: i32) -> Result<(), ShimError> {
    // SAFETY: changes thread-locals of LibTorch's; exceptions are caught inside.
    check(unsafe { sys::replay_autocast_end_beyond(nesting) })
}

/// Forgets the weights that autocast has cast so far.
pub(crate) fn autocast_clear_cache() -> Result<(), ShimError> {
    // SAFETY: no arguments; the cache has a lock of its own.
    check(unsafe { sys::replay_autocast_clear_cache() })
}

/// Whether LibTorch has CUDA. The first answer is final for the process.
pub(crate) fn has_cuda() -> bool {
    // SAFETY: LibTorch's own query; exceptions are caught inside.
    unsafe { sys::replay_has_cuda() != 0 }
}

/// The version of the LibTorch in this process; empty where it does not say.
pub(crate) fn library_version() -> Result<String, ShimError> {
    let mut text: [c_char; 32] = [0; 32];
    // SAFETY: the shim writes at most the capacity, NUL included.
    check(unsafe { sys::replay_version(text.as_mut_ptr(), text.len()) })?;
    // SAFETY: NUL-terminated by the shim, or all zero.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// Loads a shared library for the rest of the process, its symbols open to all.
pub(crate) fn load_library(name: &str) -> Result<(), libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: runs the initialisers of LibTorch's own library, which register its kernels and hooks, as they do
    // where the program was linked with it. It is never unloaded.
    let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) }?;
    std::mem::forget(library);
    Ok(())
}
