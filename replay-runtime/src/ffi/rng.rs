//! The default generators of random numbers, and the order among threads that draw from them; `cpp/rng.h`.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::{Device, Tensor};

use super::state::device_code;
use super::tensor::{returned, returned_some};
use super::{ShimError, check, sys};

/// The state of the device's default generator.
pub(crate) fn rng_get(device: Device) -> Result<Tensor, ShimError> {
    let (kind, index) = device_code(device);
    // SAFETY: the generator is read under its own lock; the result is new.
    unsafe { returned_some(|out| sys::replay_rng_get(kind, index, out)) }
}

/// Sets the state of the device's default generator.
pub(crate) fn rng_set(device: Device, state: &Tensor) -> Result<(), ShimError> {
    let (kind, index) = device_code(device);
    // SAFETY: `state` is borrowed for the call; the generator copies it under its own lock, after checking it.
    check(unsafe { sys::replay_rng_set(kind, index, state.as_ptr()) })
}

/// A hash of the bytes of a contiguous CPU tensor.
pub(crate) fn bytes_hash(tensor: &Tensor) -> Result<u64, ShimError> {
    let mut hash = 0;
    // SAFETY: `tensor` is borrowed for the call, which reads its bytes after checking that it is one of that kind.
    check(unsafe { sys::replay_bytes_hash(tensor.as_ptr(), &raw mut hash) })?;
    Ok(hash)
}

/// Counts this thread among those that have rollouts, until it ends; if it joins, its draws wait for theirs while
/// there are any.
pub(crate) fn register_thread(join: bool) -> Result<(), ShimError> {
    // SAFETY: touches a counter and the thread's own state.
    check(unsafe { sys::replay_draws_register(c_int::from(join)) })
}

/// Whether several threads have rollouts.
pub(crate) fn several_threads() -> bool {
    // SAFETY: reads an atomic counter.
    unsafe { sys::replay_draws_shared() != 0 }
}

/// No other thread that has rollouts draws while this lives, as far as it has joined.
#[derive(Debug)]
pub(crate) struct DrawLock(PhantomData<*const ()>);

impl DrawLock {
    pub(crate) fn hold() -> Self {
        // SAFETY: locks a mutex that this thread does not hold, or counts that it holds it once more.
        unsafe { sys::replay_draws_hold() };
        Self(PhantomData)
    }
}

impl Drop for DrawLock {
    fn drop(&mut self) {
        // SAFETY: on the thread that took it, since this type stays on its thread; as often as it was taken.
        unsafe { sys::replay_draws_release() }
    }
}

/// Notes the generators' states before this thread's first draw, and holds the lock from then on. Dropped on this
/// thread, innermost first: it is a local of functions that call each other.
#[derive(Debug)]
pub(crate) struct DrawWatch(NonNull<sys::CWatch>);

impl DrawWatch {
    /// Watches the CPU's generator and, if `cuda` is one, that of the CUDA device.
    pub(crate) fn begin(cuda: Option<Device>) -> Result<Self, ShimError> {
        let mut out = ptr::null_mut();
        let index = cuda.map_or(-1, |device| device_code(device).1);
        // SAFETY: `out` receives an object that only we own, and that the thread's callback reaches until we free it.
        check(unsafe { sys::replay_watch_begin(index, &raw mut out) })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without an object")))
    }

    /// The device's state before the first draw from whatever generator; `None` if there was none.
    pub(crate) fn before(&self, device: Device) -> Result<Option<Tensor>, ShimError> {
        // SAFETY: the object lives as long as `self`; the result is new.
        unsafe { returned(|out| sys::replay_watch_state(self.0.as_ptr(), device_code(device).0, out)) }
    }
}

impl Drop for DrawWatch {
    fn drop(&mut self) {
        // SAFETY: made by `replay_watch_begin` on this thread, freed once.
        unsafe { sys::replay_watch_end(self.0.as_ptr()) }
    }
}
