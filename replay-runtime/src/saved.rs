//! Saved inputs: what keeps them alive is counted once per rollout, however many blocks read it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use tch::Tensor;

use crate::ffi::{self, Fingerprint, SavedTensor, ShimError};

/// The inputs that live nodes of a rollout keep.
///
/// Addresses are valid while the saved tensors beside them live, which is also how long they stay taken.
#[derive(Default)]
pub(crate) struct SavedInputs {
    /// By version counter and fingerprint, which all views of one tensor share that look alike.
    tensors: RefCell<HashMap<(usize, Fingerprint), Weak<SavedTensor>>>,
    /// Those of which something is kept, by address.
    storages: RefCell<HashMap<usize, Weak<()>>>,
}

/// A saved input and the bytes that saving it costs: 0 where they are kept already.
pub(crate) struct Kept {
    pub(crate) saved: Arc<SavedTensor>,
    pub(crate) bytes: u64,
}

impl SavedInputs {
    /// Keeps `tensor` as it is now, which is what `print` says. Without a copy on the host its whole storage is kept
    /// alive, which costs nothing if it is `held` by a variable.
    pub(crate) fn keep(
        &self,
        tensor: &Tensor,
        print: &Fingerprint,
        on_host: bool,
        held: bool,
    ) -> Result<Kept, ShimError> {
        // The whole fingerprint, since `set_data` gives a tensor other values at the same version. Whether it
        // requires grad is no matter of its values.
        let key = (ffi::counter(tensor), Fingerprint { requires_grad: false, ..*print });
        let mut tensors = self.tensors.borrow_mut();
        if let Some(saved) = tensors.get(&key).and_then(Weak::upgrade)
            && saved.is(tensor)
        {
            return Ok(Kept { saved, bytes: 0 });
        }
        let on_host = on_host && tensor.device().is_cuda();
        let (storage, bytes) = match ffi::storage(tensor) {
            Some(address) if !on_host => {
                let (storage, known) = self.storage(address);
                (Some(storage), if known || held { 0 } else { ffi::storage_nbytes(tensor) })
            }
            _ => (None, ffi::nbytes(tensor)),
        };
        // Dead entries would otherwise pile up over a long rollout; doubling keeps the sweep cheap.
        if tensors.len() == tensors.capacity() {
            tensors.retain(|_, saved| saved.strong_count() > 0);
        }
        let saved = Arc::new(SavedTensor::new(tensor, on_host, storage)?);
        tensors.insert(key, Arc::downgrade(&saved));
        Ok(Kept { saved, bytes })
    }

    /// What is held by all that is kept of one storage, and whether anything was.
    fn storage(&self, address: usize) -> (Arc<()>, bool) {
        let mut storages = self.storages.borrow_mut();
        if let Some(known) = storages.get(&address).and_then(Weak::upgrade) {
            return (known, true);
        }
        if storages.len() == storages.capacity() {
            storages.retain(|_, held| held.strong_count() > 0);
        }
        let new = Arc::new(());
        storages.insert(address, Arc::downgrade(&new));
        (new, false)
    }

    pub(crate) fn clear(&self) {
        self.tensors.take();
        self.storages.take();
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
            drop(keep(&saved, tensor));
        }
        let entries = [saved.tensors.borrow().len(), saved.storages.borrow().len()];
        assert!(entries.iter().all(|&entries| entries < 20), "{entries:?} entries of dead inputs");
    }

    /// So that a view made anew is copied to the host once; what looks like it and is something else is not taken for it.
    #[test]
    fn a_view_made_anew_is_the_same_saved_tensor() {
        let saved = SavedInputs::default();
        let mut base = Tensor::zeros([4, 4], (tch::Kind::Float, tch::Device::Cpu));
        let first = keep(&saved, &base.get(1)).saved;
        let same = |tensor: &Tensor| Arc::ptr_eq(&first, &keep(&saved, tensor).saved);
        assert!(same(&base.get(1)) && same(&base.narrow(0, 1, 1).get(0)) && same(&base.get(1).detach()));
        assert!(!same(&base.get(2)), "another place");
        assert!(!same(&base.narrow(0, 1, 1)), "another shape");
        assert!(!same(&base.tr().narrow(1, 1, 1).squeeze_dim(1).as_strided([4], [0], 4)), "other strides");
        assert!(!same(&base.get(1).data()), "another counter");
        assert!(!same(&base.get(1).view_dtype(tch::Kind::Int)), "another kind");
        assert!(!same(&Tensor::zeros([4], (tch::Kind::Float, tch::Device::Cpu))), "another storage");
        let _ = base.g_add_scalar_(1.0);
        assert!(!same(&base.get(1)), "another version");
    }

    /// The address of a storage that is gone may come again.
    #[test]
    fn a_storage_counts_while_something_of_it_is_kept() {
        let saved = SavedInputs::default();
        let base = Tensor::zeros([8], (tch::Kind::Float, tch::Device::Cpu));
        let first = keep(&saved, &base.narrow(0, 0, 1));
        let second = keep(&saved, &base.narrow(0, 1, 1));
        assert_eq!([first.bytes, second.bytes], [32, 0]);
        drop(first);
        assert_eq!(keep(&saved, &base.narrow(0, 2, 1)).bytes, 0);
        drop(second);
        assert_eq!(keep(&saved, &base.narrow(0, 2, 1)).bytes, 32);
    }

    fn keep(saved: &SavedInputs, tensor: &Tensor) -> Kept {
        saved.keep(tensor, &ffi::fingerprint(tensor).unwrap(), false, false).unwrap()
    }
}
