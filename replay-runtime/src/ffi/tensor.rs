//! Tensors across the boundary: who owns what, and the few questions that tch does not answer.

use std::ffi::c_int;
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use super::{ShimError, check, sys};

/// Takes over a tensor that the shim made with `new`.
///
/// # Safety
/// `raw` is null or a heap-allocated `at::Tensor` that nobody else owns.
pub(super) unsafe fn from_raw(raw: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: ownership passes to the `Tensor`, whose drop deletes it, as the caller promises.
    (!raw.is_null()).then(|| unsafe { Tensor::from_ptr(raw) })
}

/// Borrowed pointers, null for `None`.
pub(super) fn raw_options<'t>(tensors: impl IntoIterator<Item = Option<&'t Tensor>>) -> Vec<*const C_tensor> {
    tensors.into_iter().map(|tensor| tensor.map_or(ptr::null(), Tensor::as_ptr)).collect()
}

/// Borrowed pointers.
pub(super) fn raw<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Vec<*const C_tensor> {
    raw_options(tensors.into_iter().map(Some))
}

/// A call that writes one new tensor, or null, to its last argument.
///
/// # Safety
/// `call` writes to the pointer only null or a tensor that nobody else owns.
pub(super) unsafe fn returned(call: impl FnOnce(*mut *mut C_tensor) -> c_int) -> Result<Option<Tensor>, ShimError> {
    let mut out = ptr::null_mut();
    check(call(&raw mut out))?;
    // SAFETY: as the caller promises.
    Ok(unsafe { from_raw(out) })
}

/// [`returned`] for calls that always return a tensor when they succeed.
///
/// # Safety
/// As for [`returned`], and `call` writes a tensor when it answers 0.
pub(super) unsafe fn returned_some(call: impl FnOnce(*mut *mut C_tensor) -> c_int) -> Result<Tensor, ShimError> {
    // SAFETY: as the caller promises.
    let tensor = unsafe { returned(call) }?;
    Ok(tensor.expect("the shim answered 0 without a tensor"))
}

/// `tensor` without history. With `aliases`, a view on which an in-place operation is an error.
pub(crate) fn detach_output(tensor: &Tensor, aliases: bool) -> Result<Tensor, ShimError> {
    // SAFETY: `tensor` is borrowed for the call; the result is new.
    unsafe { returned_some(|out| sys::replay_detach_output(tensor.as_ptr(), c_int::from(aliases), out)) }
}

/// A copy of its values, without history; unlike tch's, of tensors of every layout.
pub(crate) fn copy(tensor: &Tensor) -> Result<Tensor, ShimError> {
    // SAFETY: `tensor` is borrowed for the call; the result is new.
    unsafe { returned_some(|out| sys::replay_copy(tensor.as_ptr(), out)) }
}

/// The address of the tensor itself: equal for handles to one tensor, for as long as one of them lives.
pub(crate) fn identity(tensor: &Tensor) -> usize {
    // SAFETY: reads a pointer; does not throw.
    unsafe { sys::replay_impl(tensor.as_ptr()) }
}

/// The address of its storage; `None` where there is none or it is empty.
pub(crate) fn storage(tensor: &Tensor) -> Option<usize> {
    // SAFETY: `tensor` is borrowed for the call; exceptions are caught inside.
    let address = unsafe { sys::replay_storage(tensor.as_ptr()) };
    (address != 0).then_some(address)
}

/// Whether no other tensor has its storage.
pub(crate) fn owns_storage(tensor: &Tensor) -> bool {
    // SAFETY: `tensor` is borrowed for the call; exceptions are caught inside.
    unsafe { sys::replay_owns_storage(tensor.as_ptr()) != 0 }
}

/// The address of its version counter, which its views and what is detached from it have too.
pub(crate) fn counter(tensor: &Tensor) -> usize {
    // SAFETY: reads a pointer; does not throw.
    unsafe { sys::replay_counter(tensor.as_ptr()) }
}

/// Bytes of its whole storage; 0 where there is none.
pub(crate) fn storage_nbytes(tensor: &Tensor) -> u64 {
    // SAFETY: `tensor` is borrowed for the call; exceptions are caught inside.
    unsafe { sys::replay_storage_nbytes(tensor.as_ptr()) }
}

/// Bytes of its values, expanded dimensions counted once.
pub(crate) fn nbytes(tensor: &Tensor) -> u64 {
    // SAFETY: `tensor` is borrowed for the call; exceptions are caught inside.
    unsafe { sys::replay_nbytes(tensor.as_ptr()) }
}

/// `.grad`; `None` where it is undefined.
pub(crate) fn grad(tensor: &Tensor) -> Result<Option<Tensor>, ShimError> {
    // SAFETY: read under the lock that LibTorch adds to it under; the result is new.
    unsafe { returned(|out| sys::replay_get_grad(tensor.as_ptr(), out)) }
}

/// Moves `.grad` out; `None` where it is undefined.
pub(crate) fn take_grad(tensor: &Tensor) -> Result<Option<Tensor>, ShimError> {
    // SAFETY: `.grad` is a field behind the shared tensor handle, moved under the lock that LibTorch adds to it under;
    // the result is new.
    unsafe { returned(|out| sys::replay_take_grad(tensor.as_ptr(), out)) }
}

/// Puts `grad` into `.grad`; `None` makes it undefined.
pub(crate) fn set_grad(tensor: &Tensor, grad: Option<&Tensor>) -> Result<(), ShimError> {
    let grad = grad.map_or(ptr::null(), Tensor::as_ptr);
    // SAFETY: both are borrowed for the call; C++ shares `grad` by its own count.
    check(unsafe { sys::replay_set_grad(tensor.as_ptr(), grad) })
}

/// Adds `old` and `.grad`, in place in `old` where that can hold the sum, else in place in `.grad`, and puts the sum into
/// `.grad`. The bytes of a sum that neither can hold. With `widen`, an `old` of a narrower kind cannot.
pub(crate) fn add_grad(tensor: &Tensor, old: &Tensor, widen: bool) -> Result<u64, ShimError> {
    let mut copied = 0;
    // SAFETY: both are borrowed for the call; an in-place operation goes through the shared handle, as in tch.
    check(unsafe { sys::replay_add_grad(tensor.as_ptr(), old.as_ptr(), c_int::from(widen), &raw mut copied) })?;
    Ok(copied)
}
