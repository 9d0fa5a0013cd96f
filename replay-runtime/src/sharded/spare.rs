//! Memory between two transfers.
//!
//! Units are alike, and each needs room for what it gathers and receives. Taken anew each time, between what stays, such room leaves
//! the allocator with holes that nothing fits into: twice the memory that is in use, in the end.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use crate::ffi;

/// More is not kept: twice the parameters of a large unit.
const MOST: usize = 64;

/// Vectors that will be written to again.
#[derive(Default)]
pub(super) struct Spare(RefCell<Vec<Tensor>>);

impl Spare {
    /// A vector of unknown values.
    pub(super) fn take(&self, numel: i64, kind: Kind, device: Device) -> Tensor {
        let mut spare = self.0.borrow_mut();
        let fits = |tensor: &Tensor| tensor.size() == [numel] && tensor.kind() == kind && tensor.device() == device;
        // A view of it may live on, in a graph or where a body has put it.
        match spare.iter().rposition(|tensor| fits(tensor) && ffi::owns_storage(tensor)) {
            Some(at) => spare.swap_remove(at),
            None => Tensor::empty([numel], (kind, device)),
        }
    }

    pub(super) fn give(&self, tensors: impl IntoIterator<Item = Tensor>) {
        let mut spare = self.0.borrow_mut();
        spare.extend(tensors);
        let over = spare.len().saturating_sub(MOST);
        spare.drain(..over);
    }

    pub(super) fn clear(&self) {
        self.0.take();
    }
}
