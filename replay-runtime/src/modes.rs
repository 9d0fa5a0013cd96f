//! The modes of a thread that change what an operation computes, restored by guards, also on unwind.

use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::ffi::{self, Modes, ShimError};

/// Sets the thread's modes, and puts back those it found when it is dropped.
pub(crate) struct ModesGuard {
    before: Modes,
    autocast: bool,
    /// Open scopes of autocast. tch's own does not close its scope on unwind.
    nesting: i32,
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
        let guard = Self { before, autocast, nesting: ffi::autocast_nesting(), _thread: PhantomData };
        modes.set()?;
        Ok(guard)
    }
}

impl Drop for ModesGuard {
    fn drop(&mut self) {
        // Nothing can be done about an error here, and none is known: these are the values that were read.
        let _ = ffi::autocast_end_beyond(self.nesting);
        if self.autocast {
            let _ = ffi::autocast_clear_cache();
        }
        let _ = self.before.set();
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
