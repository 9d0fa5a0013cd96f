//! The gradient accumulator is `.grad` itself: LibTorch hands the first block's gradient over and adds later ones
//! in place. What this module adds is the transaction around it. Gradients from before are moved aside, so that a
//! failure can put them back, and at the end the rollout's sum is added into them, in place.

use std::collections::HashSet;

use tch::Tensor;

use crate::ffi::{self, ShimError};

/// The gradients of a set of leaves, from the start of a backward pass until it is committed or dropped.
pub(crate) struct Transaction {
    leaves: Vec<(Tensor, Option<Tensor>)>,
}

impl Transaction {
    /// Moves the gradients of `leaves` (repeated ones once) aside.
    pub(crate) fn begin(leaves: impl IntoIterator<Item = Tensor>) -> Result<Self, ShimError> {
        let mut seen = HashSet::new();
        let mut transaction = Self { leaves: Vec::new() };
        for leaf in leaves {
            if seen.insert(ffi::identity(&leaf)) {
                let old = ffi::take_grad(&leaf)?;
                transaction.leaves.push((leaf, old));
            }
        }
        Ok(transaction)
    }

    /// Adds the new gradients to the old ones. What was `None` before and received nothing stays `None`.
    pub(crate) fn commit(mut self) -> Result<(), ShimError> {
        let _guard = tch::no_grad_guard();
        for (leaf, old) in &mut self.leaves {
            let Some(old) = old else { continue };
            let new = leaf.grad();
            if new.defined() {
                *old = add(old, &new);
            }
            ffi::set_grad(leaf, Some(old))?;
        }
        self.leaves.clear();
        Ok(())
    }
}

/// LibTorch's own rule: in place where the old gradient can hold the sum; a sparse one cannot take a dense one.
fn add(old: &mut Tensor, new: &Tensor) -> Tensor {
    if old.is_sparse() && !new.is_sparse() {
        return new + &*old;
    }
    let _ = old.g_add_(new);
    old.shallow_clone()
}

impl Drop for Transaction {
    fn drop(&mut self) {
        for (leaf, old) in &self.leaves {
            // Setting a gradient that was taken from the same leaf cannot be refused.
            let _ = ffi::set_grad(leaf, old.as_ref());
        }
    }
}
