//! One replay: check that nothing it starts from has changed, put the thread where the forward was, run the body
//! on fresh leaves, and differentiate it. Called by the engine through the block's node.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use crate::context::{ReplayingGuard, run_within};
use crate::error::{InBlock, Pass, ReplayError};
use crate::ffi::{self, NodeState, Replayer, SavedTensor, Scope, ShimError};
use crate::modes::{ModesGuard, RngGuard};
use crate::state::{Entry, Failure, OutputRecord, State};
use crate::store::difference;

impl Replayer for State<'_> {
    fn replay(&self, node: &NodeState, scope: Scope<'_>, grads: Vec<Option<Tensor>>) -> Option<Vec<Option<Tensor>>> {
        let outcome = self.replay_block(node, scope, grads);
        self.sweep();
        outcome.map_err(|error| self.fail(Failure::Error(error))).ok()
    }

    fn panicked(&self, payload: Box<dyn Any + Send>) {
        self.fail(Failure::Panic(payload));
    }
}

impl<'m> State<'m> {
    fn replay_block(
        &self,
        node: &NodeState,
        scope: Scope<'_>,
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>, ReplayError> {
        let entry = self.remove(node.entry);
        let Some((entry, saved)) = entry.zip(node.take_saved()) else {
            return Err(ReplayError::Used { block: node.block.to_string() });
        };
        let block = &*entry.label.block;
        if grads.iter().all(Option::is_none) {
            return Ok(saved.iter().map(|_| None).collect());
        }
        entry.check_unchanged(&saved)?;

        let started = Instant::now();
        let leaves = entry.leaves(&saved)?;
        // The leaves share the storage; what else was kept for this block is free from here on.
        drop(saved);
        let outputs = self.run_again(&entry, &leaves)?;
        let replayed = started.elapsed();

        let started = Instant::now();
        let (roots, grads) = entry.roots(outputs, grads);
        scope.differentiate(roots, &grads).map_err(engine_error)?;
        self.ledger.borrow_mut().replayed(block, replayed, started.elapsed());
        Ok(input_grads(&leaves))
    }

    /// Runs the body under the modes, generators and context of its forward. All of them end before the block is
    /// differentiated, which happens under the caller's, as in plain autograd.
    fn run_again(&self, entry: &Entry<'m>, leaves: &[Option<Tensor>]) -> Result<Vec<Tensor>, ReplayError> {
        let block = &*entry.label.block;
        let generators = entry.rng.iter().map(RngGuard::enter).collect::<Result<Vec<_>, _>>();
        let generators = generators.in_block(block, "set the random number generator")?;
        let modes = ModesGuard::enter(&entry.modes).in_block(block, "set the thread's modes")?;
        let pass = self.enter(Pass::Replay);
        let replaying = ReplayingGuard::enter();
        let outputs = run_within(&*entry.context, block, Pass::Replay, || (entry.body)(&self.handle(), leaves));
        drop((replaying, pass, modes));
        let outputs = outputs?;
        generators.iter().try_for_each(|generator| generator.check(block))?;
        entry.check_outputs(&outputs)?;
        Ok(outputs)
    }
}

impl Entry<'_> {
    /// New leaves with the saved values.
    fn leaves(&self, saved: &[Option<Arc<SavedTensor>>]) -> Result<Vec<Option<Tensor>>, ReplayError> {
        let leaves = saved.iter().zip(&self.inputs).map(|(saved, record)| {
            let requires_grad = record.is_some_and(|record| record.requires_grad);
            saved.as_ref().map(|saved| saved.leaf(requires_grad)).transpose()
        });
        leaves.collect::<Result<_, _>>().in_block(&self.label.block, "restore the inputs")
    }

    /// Inputs, variables and captured tensors must be those of the forward.
    fn check_unchanged(&self, saved: &[Option<Arc<SavedTensor>>]) -> Result<(), ReplayError> {
        let block = &self.label.block;
        for (i, (saved, record)) in saved.iter().zip(&self.inputs).enumerate() {
            let (Some(saved), Some(record)) = (saved, record) else { continue };
            if saved.version().in_block(block, "read an input's version")? != record.version {
                let input = self.label.inputs[i].clone();
                return Err(ReplayError::InputChanged { block: block.to_string(), input });
            }
        }
        if let Some(change) = self.variables.change().in_block(block, "read the variables")? {
            let (variable, what) = (change.variable, change.what);
            return Err(ReplayError::VariableChanged { block: block.to_string(), variable, what });
        }
        for (weak, before) in &self.captured {
            // One that is gone was made inside the body.
            let Some(tensor) = weak.upgrade() else { continue };
            let now = ffi::fingerprint(&tensor).in_block(block, "read a captured tensor")?;
            if let Some(what) = difference(before, &now) {
                let variable = format!("captured tensor of shape {:?}", tensor.size());
                return Err(ReplayError::VariableChanged { block: block.to_string(), variable, what });
            }
        }
        Ok(())
    }

    fn check_outputs(&self, outputs: &[Tensor]) -> Result<(), ReplayError> {
        let mismatch = |what: String, expected: String, found: String| {
            Err(ReplayError::OutputMismatch { block: self.label.block.to_string(), what, expected, found })
        };
        if outputs.len() != self.outputs.len() {
            let (expected, found) = (self.outputs.len(), outputs.len());
            return mismatch("number of outputs".to_owned(), expected.to_string(), found.to_string());
        }
        for (i, (output, expected)) in outputs.iter().zip(&self.outputs).enumerate() {
            if !output.defined() {
                return Err(ReplayError::UndefinedOutput { block: self.label.block.to_string(), output: i });
            }
            let found = OutputRecord::of(output);
            if found != *expected {
                return mismatch(format!("output {i}"), expected.to_string(), found.to_string());
            }
        }
        Ok(())
    }

    /// The outputs to differentiate and the gradients that arrived for them.
    fn roots(&self, outputs: Vec<Tensor>, grads: Vec<Option<Tensor>>) -> (Vec<Tensor>, Vec<Tensor>) {
        let mut outputs: Vec<_> = outputs.into_iter().map(Some).collect();
        let arrived = self.recorded.iter().zip(grads);
        arrived.filter_map(|(&i, grad)| Some((outputs[i].take()?, grad?))).unzip()
    }
}

/// What the pass left in the leaves.
fn input_grads(leaves: &[Option<Tensor>]) -> Vec<Option<Tensor>> {
    leaves.iter().map(|leaf| leaf.as_ref().map(Tensor::grad).filter(Tensor::defined)).collect()
}

/// What the engine reported, as far as no block's own failure says more.
pub(crate) fn engine_error(error: ShimError) -> ReplayError {
    match error.code {
        ffi::Code::OtherRollout => ReplayError::OtherRollout { message: error.brief },
        ffi::Code::ForeignBackward => ReplayError::ForeignBackward { message: error.brief },
        ffi::Code::Busy => ReplayError::Busy { message: error.brief },
        _ => ReplayError::Backward { source: error.into() },
    }
}
