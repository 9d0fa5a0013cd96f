//! What a store takes of a process's memory.

use std::fmt;

use super::{Param, RESIDENT, Sharded};
use crate::ffi;

/// Bytes of one process. `Display` is a line for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Pieces of parameters.
    pub pieces: u64,
    /// Gradients of pieces that there are now.
    pub gradients: u64,
    /// Variables that are whole everywhere: buffers, and what is ignored.
    pub whole: u64,
    /// The resident unit, which is whole while a rollout lives, and once more for its gradients in the backward pass.
    pub resident: u64,
    /// The largest unit, which is whole while one of its blocks runs, and once more for its gradients in the backward pass.
    pub largest_unit: u64,
    /// The most bytes of whole parameters that there have been at once, beside the pieces, which they are themselves in a world of one;
    /// without those that were on their way.
    pub gathered_peak: u64,
}

impl Sharded<'_> {
    /// What this store takes of this process's memory, without what an optimizer and rollouts keep.
    pub fn memory_report(&self) -> MemoryReport {
        let of_unit = |unit: usize| self.params_of(unit).map(Param::bytes).sum::<u64>();
        let grad = |param: &Param| ffi::grad(&param.tensor).ok().flatten().map_or(0, |grad| ffi::nbytes(&grad));
        MemoryReport {
            pieces: self.params.iter().map(Param::piece_bytes).sum(),
            gradients: self.params.iter().map(grad).sum(),
            whole: self.whole.iter().map(|(_, tensor)| ffi::nbytes(tensor)).sum(),
            resident: of_unit(RESIDENT),
            largest_unit: (1..self.units.len()).map(of_unit).max().unwrap_or_default(),
            gathered_peak: self.peak.get(),
        }
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pieces, gradients, whole, resident, largest_unit, gathered_peak } = *self;
        let lines = [
            ("pieces of parameters", pieces),
            ("their gradients", gradients),
            ("whole everywhere", whole),
            ("resident unit", resident),
            ("largest unit", largest_unit),
            ("gathered at the peak", gathered_peak),
        ];
        for (i, (what, bytes)) in lines.into_iter().enumerate() {
            let end = if i + 1 == lines.len() { "" } else { "\n" };
            write!(f, "{what:<22}{bytes:>16} bytes{end}")?;
        }
        Ok(())
    }
}
