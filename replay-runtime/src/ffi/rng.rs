//! The default generators of random numbers, and the order among threads that draw from them; `cpp/rng.h`.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::{Device, Tensor};

use super::state::device_code;
use super::tensor::returned_some;
use super::{ShimError, check, sys};

/// Where a device's default generator stood once.
#[derive(Debug)]
pub(crate) struct GeneratorState {
    pub(crate) device: Device,
    state: NonNull<sys::CGenerator>,
}

impl GeneratorState {
    /// Where it stands now.
    pub(crate) fn read(device: Device) -> Result<Self, ShimError> {
        let (kind, index) = device_code(device);
        let mut out = ptr::null_mut();
        // SAFETY: the generator is read under its own lock; `out` receives an object that only we own.
        check(unsafe { sys::replay_rng_read(kind, index, &raw mut out) })?;
        Ok(Self { device, state: NonNull::new(out).expect("the shim answered 0 without an object") })
    }

    /// Puts the generator there again.
    pub(crate) fn write(&self) -> Result<(), ShimError> {
        // SAFETY: the object lives as long as `self`; the generator copies from it under its own lock.
        check(unsafe { sys::replay_rng_write(self.state.as_ptr()) })
    }

    /// Whether the generator stands there now.
    pub(crate) fn stands(&self) -> Result<bool, ShimError> {
        let mut stands = 0;
        // SAFETY: the object lives as long as `self`; the generator is read under its own lock.
        check(unsafe { sys::replay_rng_stands(self.state.as_ptr(), &raw mut stands) })?;
        Ok(stands != 0)
    }

    /// Whether both are of one device, and the same numbers follow.
    pub(crate) fn equals(&self, other: &Self) -> Result<bool, ShimError> {
        let mut equal = 0;
        // SAFETY: both objects live as long as their owners, and are only read.
        check(unsafe { sys::replay_rng_equal(self.state.as_ptr(), other.state.as_ptr(), &raw mut equal) })?;
        Ok(equal != 0)
    }
}

impl Drop for GeneratorState {
    fn drop(&mut self) {
        // SAFETY: made by the shim, owned by `self` alone, freed once.
        unsafe { sys::replay_rng_free(self.state.as_ptr()) }
    }
}

/// Where a device's default generator stands, as bytes for a file.
pub(crate) fn generator_bytes(device: Device) -> Result<Tensor, ShimError> {
    let (kind, index) = device_code(device);
    // SAFETY: the generator is read under its own lock; the result is new.
    unsafe { returned_some(|out| sys::replay_rng_bytes(kind, index, out)) }
}

/// Puts it where those bytes say; others than [`generator_bytes`]' are an error.
pub(crate) fn set_generator_bytes(device: Device, bytes: &Tensor) -> Result<(), ShimError> {
    let (kind, index) = device_code(device);
    // SAFETY: `bytes` is borrowed for the call; the generator copies from it under its own lock.
    check(unsafe { sys::replay_rng_set_bytes(kind, index, bytes.as_ptr()) })
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
    pub(crate) fn before(&self, device: Device) -> Result<Option<GeneratorState>, ShimError> {
        let mut out = ptr::null_mut();
        // SAFETY: the object lives as long as `self`; `out` receives null or an object that only we own.
        check(unsafe { sys::replay_watch_state(self.0.as_ptr(), device_code(device).0, &raw mut out) })?;
        Ok(NonNull::new(out).map(|state| GeneratorState { device, state }))
    }
}

impl Drop for DrawWatch {
    fn drop(&mut self) {
        // SAFETY: made by `replay_watch_begin` on this thread, freed once.
        unsafe { sys::replay_watch_end(self.0.as_ptr()) }
    }
}
