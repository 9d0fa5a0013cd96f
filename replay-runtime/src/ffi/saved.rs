//! Inputs kept from the forward to the replay, and references that keep nothing; `cpp/saved.h`.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use tch::Tensor;

use super::tensor::{from_raw, returned_some};
use super::{Fingerprint, ShimError, check, sys};

/// An input kept for the replay: detached, on the same storage and version counter, or a copy on the host.
///
/// While it lives, the addresses of the tensor it was made from, of its storage and of its
/// [version counter](super::counter) are not used again.
#[derive(Debug)]
pub(crate) struct SavedTensor {
    raw: NonNull<sys::CSaved>,
    /// Lives as long as anything that was saved of the same storage.
    _storage: Option<Arc<()>>,
}

// SAFETY: owns a C++ object whose fields are written once, by the constructor. All later calls read it, and
// LibTorch's reference counts and version counters are atomic, so any thread may read and any may drop it.
unsafe impl Send for SavedTensor {}
// SAFETY: as above.
unsafe impl Sync for SavedTensor {}

impl SavedTensor {
    /// `on_host`: copy the values of a CUDA tensor to pinned host memory. CPU tensors are never copied. `storage` is
    /// held by what was saved of one storage.
    pub(crate) fn new(tensor: &Tensor, on_host: bool, storage: Option<Arc<()>>) -> Result<Self, ShimError> {
        let mut out = std::ptr::null_mut();
        // SAFETY: `tensor` is borrowed for the call; `out` receives an object that only we own.
        check(unsafe { sys::replay_saved_new(tensor.as_ptr(), c_int::from(on_host), &raw mut out) })?;
        let raw = NonNull::new(out).expect("the shim answered 0 without an object");
        Ok(Self { raw, _storage: storage })
    }

    /// Whether it was made of the same part of the same storage under the same version counter as `tensor`, and of
    /// `tensor` itself where that has no storage. With equal fingerprints it holds its values.
    pub(crate) fn is(&self, tensor: &Tensor) -> bool {
        // SAFETY: the object lives as long as `self`; `tensor` is borrowed for the call.
        unsafe { sys::replay_saved_is(self.raw.as_ptr(), tensor.as_ptr()) != 0 }
    }

    /// A new leaf with the saved values, on the device the input was on.
    pub(crate) fn leaf(&self, requires_grad: bool) -> Result<Tensor, ShimError> {
        // SAFETY: the object lives as long as `self`; the result is new.
        unsafe { returned_some(|out| sys::replay_saved_leaf(self.raw.as_ptr(), c_int::from(requires_grad), out)) }
    }

    /// Whether it is a copy in host memory.
    pub(crate) fn is_on_host(&self) -> bool {
        // SAFETY: reads a field of an object that lives as long as `self`.
        unsafe { sys::replay_saved_on_host(self.raw.as_ptr()) != 0 }
    }

    /// That of what is kept, which changes when the input is changed in place; a copy stays as it is.
    pub(crate) fn fingerprint(&self) -> Result<Fingerprint, ShimError> {
        let mut out = Fingerprint::default();
        // SAFETY: the object lives as long as `self`; `out` has the layout of the C++ struct.
        check(unsafe { sys::replay_saved_fingerprint(self.raw.as_ptr(), &raw mut out) })?;
        Ok(out)
    }
}

impl Drop for SavedTensor {
    fn drop(&mut self) {
        // SAFETY: made by `replay_saved_new`, owned by `self` alone, freed once.
        unsafe { sys::replay_saved_free(self.raw.as_ptr()) }
    }
}

/// A tensor that is not kept alive.
#[derive(Debug)]
pub(crate) struct WeakTensor(NonNull<sys::CWeak>);

impl WeakTensor {
    pub(crate) fn new(tensor: &Tensor) -> Self {
        // SAFETY: `tensor` is borrowed for the call. Null means that memory ran out, as for a Rust `Box`.
        let raw = unsafe { sys::replay_weak_new(tensor.as_ptr()) };
        Self(NonNull::new(raw).expect("out of memory for a weak reference"))
    }

    /// The tensor, if it still lives.
    pub(crate) fn upgrade(&self) -> Option<Tensor> {
        // SAFETY: the object lives as long as `self`; a tensor that comes out is new.
        unsafe { from_raw(sys::replay_weak_lock(self.0.as_ptr())) }
    }
}

impl Drop for WeakTensor {
    fn drop(&mut self) {
        // SAFETY: made by `replay_weak_new`, owned by `self` alone, freed once.
        unsafe { sys::replay_weak_free(self.0.as_ptr()) }
    }
}
