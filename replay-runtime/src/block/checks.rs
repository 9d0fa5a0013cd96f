//! What a call of a block must satisfy, checked before its forward and after it.

use std::rc::Rc;

use tch::{Device, Tensor};

use super::Call;
use crate::error::{InBlock, ReplayError};
use crate::ffi::Fingerprint;
use crate::variables::Snapshot;

impl Call<'_, '_> {
    pub(super) fn check_inputs(&self) -> Result<(), ReplayError> {
        let block = || self.label.block.to_string();
        if self.inputs.iter().all(Option::is_none) {
            return Err(ReplayError::NoInput { block: block() });
        }
        for (name, input) in self.label.inputs.iter().zip(self.inputs) {
            let Some(input) = input else { continue };
            if !input.defined() {
                return Err(ReplayError::UndefinedInput { block: block(), input: name.clone() });
            }
            self.check_device(|| format!("input `{name}`"), input.device())?;
        }
        Ok(())
    }

    /// Inference tensors have no version counter, so a change could not be noticed.
    pub(super) fn check_versioned(&self) -> Result<(), ReplayError> {
        match self.inputs.iter().position(|input| input.is_some_and(Tensor::is_inference)) {
            Some(i) => Err(ReplayError::InferenceInput {
                block: self.label.block.to_string(),
                input: self.label.inputs[i].clone(),
            }),
            None => Ok(()),
        }
    }

    pub(super) fn check_outputs(&self, outputs: &[Tensor]) -> Result<(), ReplayError> {
        for (output, tensor) in outputs.iter().enumerate() {
            if !tensor.defined() {
                return Err(ReplayError::UndefinedOutput { block: self.label.block.to_string(), output });
            }
            if tensor.device().is_cuda() && self.state.cuda.get().is_none() {
                self.check_known(tensor.device())?;
            }
            self.check_device(|| format!("output {output}"), tensor.device())?;
        }
        Ok(())
    }

    /// A device on which the body computes must have been the rollout's before: its generator is kept.
    pub(super) fn check_known(&self, device: Device) -> Result<(), ReplayError> {
        match self.state.cuda.get() {
            Some(known) if known == device => Ok(()),
            _ => Err(ReplayError::UnknownDevice { block: self.label.block.to_string(), device: format!("{device:?}") }),
        }
    }

    pub(super) fn check_device(&self, tensor: impl Fn() -> String, device: Device) -> Result<(), ReplayError> {
        let error = |expected: String| ReplayError::Device {
            block: self.label.block.to_string(),
            tensor: tensor(),
            found: format!("{device:?}"),
            expected,
        };
        match (device, self.state.cuda.get()) {
            (Device::Cpu, _) => Ok(()),
            (Device::Cuda(_), None) => {
                self.state.cuda.set(Some(device));
                Ok(())
            }
            (Device::Cuda(_), Some(known)) if known == device => Ok(()),
            (Device::Cuda(_), Some(known)) => Err(error(format!("{known:?}"))),
            _ => Err(error("Cpu or Cuda".to_owned())),
        }
    }

    /// The forward must leave everything that a replay starts from as it was.
    pub(super) fn check_unwritten(
        &self,
        prints: &[Option<Fingerprint>],
        leaves: &[Option<Tensor>],
        variables: &Rc<Snapshot>,
    ) -> Result<(), ReplayError> {
        let block = || self.label.block.to_string();
        let now = self.prints()?;
        let cut = |i: usize| {
            prints[i].is_some_and(|print| print.requires_grad) && !leaves[i].as_ref().is_some_and(Tensor::requires_grad)
        };
        if let Some(i) = (0..now.len()).find(|&i| now[i] != prints[i] || cut(i)) {
            return Err(ReplayError::InputWritten { block: block(), input: self.label.inputs[i].clone() });
        }
        if self.state.variable_count() != variables.count() {
            return Err(ReplayError::VariableAdded { block: block() });
        }
        if let Some(change) = self.label.written(variables)? {
            return Err(change);
        }
        if self.label.buffers {
            self.state.watch.updated(variables).in_block(&self.label.block, "read the variables")?;
        }
        Ok(())
    }
}
