//! What tensors look like, and whether they are still what they were; `cpp/print.h`.

use std::ffi::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::tensor::raw_options;
use super::{ShimError, check, sys};

/// What must not differ between forward and replay; `struct Fingerprint` in `cpp/print.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Fingerprint {
    pub(crate) version: u64,
    pub(crate) data: u64,
    pub(crate) sample: u64,
    pub(crate) layout: u64,
    pub(crate) requires_grad: bool,
}

/// Tensors with their addresses beside them, to hand over at once.
#[derive(Debug)]
pub(crate) struct TensorList {
    tensors: Vec<Option<Tensor>>,
    /// Of the C++ handles, which the tensors own and do not replace.
    raw: Vec<*const C_tensor>,
}

impl TensorList {
    pub(crate) fn new(tensors: Vec<Option<Tensor>>) -> Self {
        let raw = raw_options(tensors.iter().map(Option::as_ref));
        Self { tensors, raw }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Option<&Tensor>> {
        self.tensors.iter().map(Option::as_ref)
    }
}

/// The first of `tensors`, not before `from`, that is no longer as in `before`. Those with one of the `values` are
/// buffers, which are compared by that instead of by version; with `versions`, by both.
///
/// # Panics
/// If the lists have different lengths, or `tensors` is not whole.
pub(crate) fn differing(
    tensors: &TensorList,
    values: &TensorList,
    before: &[Fingerprint],
    from: usize,
    versions: bool,
) -> Result<Option<usize>, ShimError> {
    let n = tensors.tensors.len();
    assert!(values.tensors.len() == n && before.len() == n && tensors.tensors.iter().all(Option::is_some));
    let mut out = n;
    // SAFETY: three arrays of `n` items; the lists own the tensors that their pointers lead to, and those of `tensors`
    // are not null.
    check(unsafe {
        let versions = c_int::from(versions);
        let (tensors, values) = (tensors.raw.as_ptr(), values.raw.as_ptr());
        sys::replay_differing(tensors, values, before.as_ptr(), n, from, versions, &raw mut out)
    })?;
    Ok((out < n).then_some(out))
}

/// What must not differ between forward and replay.
pub(crate) fn fingerprint(tensor: &Tensor) -> Result<Fingerprint, ShimError> {
    let mut out = Fingerprint::default();
    // SAFETY: `tensor` is borrowed for the call; `out` has the layout of the C++ struct.
    check(unsafe { sys::replay_fingerprint(tensor.as_ptr(), &raw mut out) })?;
    Ok(out)
}

/// Whether two tensors have equal sizes, kinds, devices and bits; a failure to compare counts as a difference.
pub(crate) fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let mut same = 0;
    // SAFETY: both are borrowed for the call, which only reads them.
    let code = unsafe { sys::replay_same_bits(a.as_ptr(), b.as_ptr(), &raw mut same) };
    code == 0 && same != 0
}

/// Whether a buffer that looked like `before` when it had the values of `value` has them still; a failure to compare
/// counts as a difference. Large ones are compared only where something says that they were written.
pub(crate) fn keeps_values(buffer: &Tensor, value: &Tensor, before: &Fingerprint) -> bool {
    let mut keeps = 0;
    // SAFETY: all three are borrowed for the call, which only reads them.
    let code = unsafe { sys::replay_keeps_values(buffer.as_ptr(), value.as_ptr(), before, &raw mut keeps) };
    code == 0 && keeps != 0
}

/// Gives `tensor` the values and the version that it had once.
pub(crate) fn put_values(tensor: &Tensor, value: &Tensor, version: u64) -> Result<(), ShimError> {
    // SAFETY: both are borrowed for the call; writing goes through the shared handle, as tch's in-place operations do.
    check(unsafe { sys::replay_put_values(tensor.as_ptr(), value.as_ptr(), version) })
}
