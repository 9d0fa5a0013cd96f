//! Saved inputs: each tensor once per rollout and version, however many blocks read it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use tch::Tensor;

use crate::ffi::{self, Fingerprint, SavedTensor, ShimError};

/// The inputs that live nodes of a rollout keep, by identity.
///
/// An entry is valid while its saved tensor lives, which is also how long the identity stays taken.
#[derive(Default)]
pub(crate) struct SavedInputs {
    by_identity: RefCell<HashMap<usize, (Fingerprint, Weak<SavedTensor>)>>,
}

/// A saved input and the bytes that saving it costs: 0 where another block keeps it already.
pub(crate) struct Kept {
    pub(crate) saved: Arc<SavedTensor>,
    pub(crate) bytes: u64,
}

impl SavedInputs {
    /// Keeps `tensor` as it is now, which is what `print` says.
    pub(crate) fn keep(&self, tensor: &Tensor, print: &Fingerprint, on_host: bool) -> Result<Kept, ShimError> {
        let identity = ffi::identity(tensor);
        // The whole fingerprint, since `set_data` gives a tensor other values at the same version. Whether it
        // requires grad is no matter of its values.
        let print = Fingerprint { requires_grad: false, ..*print };
        let mut by_identity = self.by_identity.borrow_mut();
        if let Some((known, saved)) = by_identity.get(&identity)
            && *known == print
            && let Some(saved) = saved.upgrade()
        {
            return Ok(Kept { saved, bytes: 0 });
        }
        // Dead entries would otherwise pile up over a long rollout; doubling keeps the sweep cheap.
        if by_identity.len() == by_identity.capacity() {
            by_identity.retain(|_, (_, saved)| saved.strong_count() > 0);
        }
        let saved = Arc::new(SavedTensor::new(tensor, on_host)?);
        by_identity.insert(identity, (print, Arc::downgrade(&saved)));
        Ok(Kept { saved, bytes: ffi::nbytes(tensor) })
    }

    pub(crate) fn clear(&self) {
        self.by_identity.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tensors live on, so that no identity comes twice.
    #[test]
    fn what_nobody_keeps_is_forgotten() {
        let saved = SavedInputs::default();
        let tensors: Vec<_> = (0..1000).map(|i| Tensor::from(f64::from(i))).collect();
        for tensor in &tensors {
            drop(saved.keep(tensor, &ffi::fingerprint(tensor).unwrap(), false).unwrap());
        }
        let entries = saved.by_identity.borrow().len();
        assert!(entries < 20, "{entries} entries of dead inputs");
    }
}
