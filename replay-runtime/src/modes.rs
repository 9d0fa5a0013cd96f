//! The modes of a thread that change what an operation computes, restored by guards, also on unwind; and the
//! generators of random numbers.

use std::marker::PhantomData;

use tch::{Device, Kind, Tensor};

use crate::error::{InBlock, ReplayError};
use crate::ffi::{self, Modes, ShimError};

/// Sets the thread's modes, and puts back those it found when it is dropped.
pub(crate) struct ModesGuard {
    before: Modes,
    autocast: bool,
    _thread: PhantomData<*const ()>,
}

impl ModesGuard {
    pub(crate) fn enter(modes: &Modes) -> Result<Self, ShimError> {
        let before = Modes::current()?;
        let autocast = modes.autocast_cpu || modes.autocast_cuda;
        // Weights that autocast has cast belong to the graph they were cast in. A block starts without any and
        // leaves none behind, in its forward as in its replay.
        if autocast {
            ffi::autocast_clear_cache()?;
        }
        let guard = Self { before, autocast, _thread: PhantomData };
        modes.set()?;
        Ok(guard)
    }
}

impl Drop for ModesGuard {
    fn drop(&mut self) {
        // Nothing can be done about an error here, and none is known: these are the values that were read.
        if self.autocast {
            let _ = ffi::autocast_clear_cache();
        }
        let _ = self.before.set();
    }
}

/// Where a block's random numbers came from.
pub(crate) struct RngSnapshot {
    device: Device,
    /// The state before the forward; `None` where the forward drew nothing.
    before: Option<Tensor>,
    /// The hash of the state after it.
    after: u64,
}

/// A generator's state before a forward. Dropped, which is what happens when the forward fails, it puts it back.
pub(crate) struct RngBefore {
    device: Device,
    state: Option<Tensor>,
}

impl RngBefore {
    pub(crate) fn take(device: Device) -> Result<Self, ShimError> {
        Ok(Self { device, state: Some(ffi::rng_get(device)?) })
    }

    /// The forward has succeeded: compares with the state after it, and keeps what a replay needs.
    pub(crate) fn after_forward(mut self) -> Result<RngSnapshot, ShimError> {
        let after = ffi::bytes_hash(&ffi::rng_get(self.device)?);
        let before = self.state.take().filter(|state| ffi::bytes_hash(state) != after);
        Ok(RngSnapshot { device: self.device, before, after })
    }
}

impl Drop for RngBefore {
    fn drop(&mut self) {
        if let Some(state) = &self.state {
            let _ = ffi::rng_set(self.device, state);
        }
    }
}

/// Sets a generator to where the forward found it, and back to where the replay found it when dropped.
pub(crate) struct RngGuard {
    device: Device,
    caller: Tensor,
    /// The hashes of the states in which the replay may leave it: as the forward did, or, where that drew nothing, as
    /// it found it.
    expected: [u64; 2],
    drew: bool,
}

impl RngGuard {
    pub(crate) fn enter(snapshot: &RngSnapshot) -> Result<Self, ShimError> {
        let device = snapshot.device;
        let caller = ffi::rng_get(device)?;
        let expected = match &snapshot.before {
            Some(state) => {
                ffi::rng_set(device, state)?;
                [snapshot.after; 2]
            }
            None => [snapshot.after, ffi::bytes_hash(&caller)],
        };
        Ok(Self { device, caller, expected, drew: snapshot.before.is_some() })
    }

    /// An error if the replay did not leave the generator where the forward did.
    pub(crate) fn check(&mut self, block: &str) -> Result<(), ReplayError> {
        let now = ffi::rng_get(self.device).in_block(block, "read the random number generator")?;
        let now = ffi::bytes_hash(&now);
        // The body may have seeded it: then there is something to put back.
        self.drew |= now != self.expected[1];
        if self.expected.contains(&now) {
            return Ok(());
        }
        Err(ReplayError::RngDiverged { block: block.to_owned(), device: format!("{:?}", self.device) })
    }
}

impl Drop for RngGuard {
    fn drop(&mut self) {
        // Where nothing was drawn there is nothing to put back, and another thread may have drawn meanwhile.
        if self.drew {
            let _ = ffi::rng_set(self.device, &self.caller);
        }
    }
}

/// Mixed precision for a scope of code: operations that gain from it run in a smaller type.
///
/// tch's own `autocast` knows CUDA and 16-bit floats only, and does nothing on a machine without CUDA. This guard
/// sets autocast for CPU or CUDA tensors of the current thread, in either 16-bit type, until it is dropped; it
/// restores what it found, also on unwind. Blocks replay under the autocast state of their forward.
///
/// ```no_run
/// use replay_runtime::AutocastGuard;
/// use tch::{Device, Kind};
///
/// let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
/// ```
#[must_use = "autocast ends when the guard is dropped"]
#[derive(Debug)]
pub struct AutocastGuard {
    device: Device,
    before: Modes,
    _thread: PhantomData<*const ()>,
}

impl AutocastGuard {
    /// Autocast to `kind` for operations on tensors of `device` (its index does not matter).
    ///
    /// # Panics
    /// If `device` is neither CPU nor CUDA, or `kind` is not [`Kind::BFloat16`] or [`Kind::Half`].
    pub fn new(device: Device, kind: Kind) -> Self {
        // LibTorch's numbers of its element types, c10/core/ScalarType.h.
        let dtype = match kind {
            Kind::Half => 5,
            Kind::BFloat16 => 15,
            _ => panic!("autocast casts to Kind::BFloat16 or Kind::Half, not to {kind:?}"),
        };
        Self::enter(device, true, dtype)
    }

    /// No autocast for operations on tensors of `device`, inside a scope that has it.
    ///
    /// # Panics
    /// If `device` is neither CPU nor CUDA.
    pub fn disabled(device: Device) -> Self {
        let modes = Modes::current().expect("LibTorch tells its modes");
        Self::enter(device, false, dtype_of(&modes, device))
    }

    fn enter(device: Device, enabled: bool, dtype: i8) -> Self {
        assert!(
            matches!(device, Device::Cpu | Device::Cuda(_)),
            "autocast is for CPU and CUDA tensors, not for {device:?}"
        );
        let before = Modes::current().expect("LibTorch tells its modes");
        ffi::autocast_enter(device, enabled, dtype).expect("LibTorch takes the modes it knows");
        Self { device, before, _thread: PhantomData }
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        let enabled = match self.device {
            Device::Cuda(_) => self.before.autocast_cuda,
            _ => self.before.autocast_cpu,
        };
        let _ = ffi::autocast_leave(self.device, enabled, dtype_of(&self.before, self.device));
    }
}

fn dtype_of(modes: &Modes, device: Device) -> i8 {
    match device {
        Device::Cuda(_) => modes.autocast_cuda_dtype,
        _ => modes.autocast_cpu_dtype,
    }
}

#[cfg(test)]
#[path = "modes_tests.rs"]
mod tests;
