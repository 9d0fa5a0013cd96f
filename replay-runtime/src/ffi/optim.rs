//! An optimizer of LibTorch's with its state; `cpp/optim.h`.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::Tensor;

use super::sys::{self, COptim};
use super::tensor::{from_raw, raw_options};
use super::{ShimError, c_string, check};

/// The most tensors in a parameter's state, `kSlots` in C++.
const SLOTS: usize = 3;

/// Which algorithm, `enum OptimKind` in C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OptimizerKind {
    Sgd = 0,
    Adam = 1,
    AdamW = 2,
    RmsProp = 3,
}

/// An option that can be changed, `enum OptimSetting` in C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    Lr = 0,
    Momentum = 1,
    WeightDecay = 2,
}

/// The options of all algorithms; each looks at its own. `struct OptimOptions` in C++.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OptimizerOptions {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    pub(crate) momentum: f64,
    pub(crate) dampening: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) alpha: f64,
    pub(crate) eps: f64,
    pub(crate) nesterov: c_int,
    pub(crate) amsgrad: c_int,
    pub(crate) centered: c_int,
}

/// Steps and the named tensors of one parameter's state.
pub(crate) type RawState = (u64, Vec<(&'static str, Tensor)>);

/// LibTorch's optimizer, for the thread that made it. Parameters and groups go by their number.
#[derive(Debug)]
pub(crate) struct RawOptimizer {
    raw: NonNull<COptim>,
    /// What the tensors of a state are called.
    slots: Vec<&'static str>,
    _thread: PhantomData<*const ()>,
}

impl RawOptimizer {
    /// One without parameters and groups.
    pub(crate) fn new(kind: OptimizerKind, options: &OptimizerOptions) -> Result<Self, ShimError> {
        let mut out = ptr::null_mut();
        // SAFETY: the options have the layout of the C++ struct and are borrowed for the call; `out` receives an object
        // that only we own.
        check(unsafe { sys::replay_optim_new(kind as c_int, options, &raw mut out) })?;
        let raw = NonNull::new(out).expect("the shim answered 0 without an optimizer");
        Ok(Self { raw, slots: (0..SLOTS).map_while(|slot| slot_name(kind, slot)).collect(), _thread: PhantomData })
    }

    /// One more group.
    pub(crate) fn add_group(&mut self) -> Result<(), ShimError> {
        // SAFETY: the object lives as long as `self`.
        check(unsafe { sys::replay_optim_add_group(self.raw.as_ptr()) })
    }

    /// One more parameter, once at most, in a group that was added.
    pub(crate) fn add_parameter(&mut self, name: &str, tensor: &Tensor, group: usize) -> Result<(), ShimError> {
        let name = c_string(name);
        // SAFETY: the text and the tensor are borrowed for the call; C++ takes a share of the tensor by its own count, and
        // refuses a group that it has not.
        check(unsafe { sys::replay_optim_add_parameter(self.raw.as_ptr(), tensor.as_ptr(), group, name.as_ptr()) })
    }

    pub(crate) fn step(&mut self) -> Result<(), ShimError> {
        // SAFETY: the object lives as long as `self`. Parameters are written through shared handles, as in tch.
        check(unsafe { sys::replay_optim_step(self.raw.as_ptr()) })
    }

    pub(crate) fn set(&mut self, group: usize, setting: Setting, value: f64) -> Result<(), ShimError> {
        // SAFETY: the object lives as long as `self`; C++ refuses a group that it has not.
        check(unsafe { sys::replay_optim_set(self.raw.as_ptr(), group, setting as c_int, value) })
    }

    pub(crate) fn lr(&self, group: usize) -> Result<f64, ShimError> {
        let mut lr = 0.0;
        // SAFETY: as for `set`; `lr` is written before the call returns.
        check(unsafe { sys::replay_optim_lr(self.raw.as_ptr(), group, &raw mut lr) })?;
        Ok(lr)
    }

    /// What the tensors of a state are called.
    pub(crate) fn slots(&self) -> &[&'static str] {
        &self.slots
    }

    /// The state of a parameter, if it has one; the tensors share the optimizer's storage.
    pub(crate) fn state(&self, parameter: usize) -> Result<Option<RawState>, ShimError> {
        let (mut exists, mut step, mut tensors) = (0, 0, [ptr::null_mut(); SLOTS]);
        // SAFETY: the object lives as long as `self`; C++ refuses a parameter that it has not, and writes at most as many
        // tensors as there is room for, only where it answers 0.
        check(unsafe {
            let (exists, step) = (&raw mut exists, &raw mut step);
            sys::replay_optim_state(self.raw.as_ptr(), parameter, exists, step, tensors.as_mut_ptr())
        })?;
        // SAFETY: each is null or a new tensor, which nobody else owns.
        let tensors = tensors.map(|tensor| unsafe { from_raw(tensor) });
        let named = self.slots.iter().zip(tensors).filter_map(|(slot, tensor)| Some((*slot, tensor?)));
        Ok((exists != 0).then(|| (step.unsigned_abs(), named.collect())))
    }

    /// Puts copies of the tensors in as the state of a parameter.
    pub(crate) fn set_state(
        &mut self,
        parameter: usize,
        step: u64,
        tensors: &[(&'static str, Tensor)],
    ) -> Result<(), ShimError> {
        let mut by_slot = [None; SLOTS];
        for (name, tensor) in tensors {
            let slot = self.slots.iter().position(|slot| slot == name).ok_or_else(|| {
                let known = self.slots.join("`, `");
                ShimError::refused(format!("no tensor of the optimizer's state is called `{name}`; it has `{known}`"))
            })?;
            if by_slot[slot].replace(tensor).is_some() {
                return Err(ShimError::refused(format!("the optimizer's state has `{name}` twice")));
            }
        }
        let (step, by_slot) = (i64::try_from(step).unwrap_or(i64::MAX), raw_options(by_slot));
        // SAFETY: the object lives as long as `self`; there is a pointer, or null, for each slot, and the tensors are
        // borrowed for the call. C++ refuses a parameter that it has not, and what does not fit it.
        check(unsafe { sys::replay_optim_set_state(self.raw.as_ptr(), parameter, step, by_slot.as_ptr()) })
    }

    /// The parameter has no state any more.
    pub(crate) fn drop_state(&mut self, parameter: usize) -> Result<(), ShimError> {
        // SAFETY: the object lives as long as `self`; C++ refuses a parameter that it has not.
        check(unsafe { sys::replay_optim_drop_state(self.raw.as_ptr(), parameter) })
    }
}

fn slot_name(kind: OptimizerKind, slot: usize) -> Option<&'static str> {
    // SAFETY: does not throw.
    let name = unsafe { sys::replay_optim_slot(kind as c_int, slot) };
    // SAFETY: a constant of the shim's, which ends with a zero byte.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().expect("the shim's own names are ASCII"))
}

impl Drop for RawOptimizer {
    fn drop(&mut self) {
        // SAFETY: made by `replay_optim_new`, owned by `self` alone, freed once.
        unsafe { sys::replay_optim_free(self.raw.as_ptr()) }
    }
}
