//! The detached tensors that a body runs on in place of its block's inputs, and what becomes of those that outlive it.

use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use crate::error::ReplayError;
use crate::ffi::{self, ShimError, WeakTensor};
use crate::state::{Escaped, Label, State};

/// The leaves of one forward, which carry the inputs' own `requires_grad`.
///
/// When they are dropped, which must be after the graph of the outputs, those that live on are held by a graph that left
/// the body unseen, however the body ended: this rollout's loss must not depend on it, and other backward passes that
/// come to it are refused.
pub(crate) struct Leaves<'m> {
    state: Rc<State<'m>>,
    label: Rc<Label>,
    tensors: Vec<Option<Tensor>>,
    /// The graph that the runtime itself keeps holds them, and lets no pass by but its own.
    recorded: bool,
}

impl<'m> Leaves<'m> {
    pub(crate) fn of(state: &Rc<State<'m>>, label: &Rc<Label>, inputs: &[Option<&Tensor>]) -> Result<Self, ShimError> {
        let leaf = |input: &Tensor| {
            let leaf = ffi::detach_output(input, false)?;
            Ok(if input.requires_grad() { leaf.set_requires_grad(true) } else { leaf })
        };
        let tensors = inputs.iter().map(|input| input.map(leaf).transpose()).collect::<Result<_, _>>()?;
        Ok(Self { state: Rc::clone(state), label: Rc::clone(label), tensors, recorded: false })
    }

    /// They live on in a recorded graph; the identities of those that take a gradient.
    pub(crate) fn recorded(&mut self) -> Vec<usize> {
        self.recorded = true;
        self.tensors.iter().flatten().filter(|leaf| leaf.requires_grad()).map(ffi::identity).collect()
    }

    /// Those of a later run whose graph is dropped too.
    pub(crate) fn again(state: Rc<State<'m>>, label: &Rc<Label>, tensors: Vec<Option<Tensor>>) -> Self {
        Self { state, label: Rc::clone(label), tensors, recorded: false }
    }
}

impl Deref for Leaves<'_> {
    type Target = [Option<Tensor>];

    fn deref(&self) -> &Self::Target {
        &self.tensors
    }
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        for (leaf, name) in self.tensors.drain(..).zip(&self.label.inputs) {
            let Some(leaf) = leaf.filter(Tensor::requires_grad) else { continue };
            let (identity, weak) = (ffi::identity(&leaf), WeakTensor::new(&leaf));
            drop(leaf);
            if let Some(leaf) = weak.upgrade() {
                let block = Arc::clone(&self.label.block);
                if !self.recorded {
                    let why = ReplayError::Escaped { block: block.to_string(), input: name.clone() }.to_string();
                    // It fails where memory has run out; this rollout still knows the leaf.
                    let _ = ffi::refuse_grad(&leaf, &why);
                }
                let noted = Escaped { block, input: name.clone(), _leaf: weak };
                self.state.escaped.borrow_mut().insert(identity, noted);
            }
        }
    }
}
