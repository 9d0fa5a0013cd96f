//! The gradient accumulator is `.grad` itself: LibTorch hands the first block's gradient over and adds later ones
//! in place. What this module adds is the transaction around it. Gradients from before are moved aside, so that a
//! failure can put them back, and at the end the rollout's sum is added into them, in place.

use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use tch::{TchError, Tensor};

use crate::error::ReplayError;
use crate::ffi::{self, ShimError};
use crate::state::Options;

/// The gradients of a set of leaves, from the start of a backward pass until it is committed or dropped.
pub(crate) struct Transaction {
    /// With what was moved aside; empty where nothing is.
    leaves: Vec<(Tensor, Option<Tensor>)>,
    /// Old gradients of a narrower kind than the new ones are widened.
    widen: bool,
    _claim: Option<Claim>,
}

impl Transaction {
    /// Moves the gradients of `leaves` (repeated ones once) aside, if `options` say so.
    pub(crate) fn begin(leaves: &[Tensor], options: Options) -> Result<Self, ReplayError> {
        let mut seen = HashSet::new();
        let leaves = leaves.iter().filter(|leaf| seen.insert(ffi::identity(leaf)));
        let leaves: Vec<_> = leaves.map(Tensor::shallow_clone).collect();
        let widen = options.accumulate.is_some();
        // Accumulators that two rollouts widen would not be put back as they were.
        let claim = (options.transaction || widen).then(|| Claim::new(&leaves)).transpose()?;
        let mut transaction = Self { leaves: Vec::new(), widen, _claim: claim };
        for leaf in leaves.into_iter().filter(|_| options.transaction) {
            let old = ffi::take_grad(&leaf).map_err(shim_failed)?;
            transaction.leaves.push((leaf, old));
        }
        Ok(transaction)
    }

    /// Adds the new gradients to the old ones. What was `None` before and received nothing stays `None`. How many bytes
    /// of gradients had to be copied for it.
    ///
    /// Whether they can be added is known before the first is touched.
    pub(crate) fn commit(mut self) -> Result<u64, ReplayError> {
        for (leaf, old) in &self.leaves {
            check_addable(old.as_ref(), ffi::grad(leaf).map_err(shim_failed)?.as_ref())?;
        }
        let mut copied = 0;
        for (leaf, old) in &self.leaves {
            if let Some(old) = old {
                copied += ffi::add_grad(leaf, old, self.widen).map_err(shim_failed)?;
            }
        }
        self.leaves.clear();
        Ok(copied)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        for (leaf, old) in &self.leaves {
            // Setting a gradient that was taken from the same leaf cannot be refused.
            let _ = ffi::set_grad(leaf, old.as_ref());
        }
    }
}

fn shim_failed(error: ShimError) -> ReplayError {
    ReplayError::Backward { source: error.into() }
}

/// The variable may have been given other data since its old gradient was computed.
fn check_addable(old: Option<&Tensor>, new: Option<&Tensor>) -> Result<(), ReplayError> {
    let Some((old, new)) = old.zip(new) else { return Ok(()) };
    if old.size() == new.size() && old.device() == new.device() {
        return Ok(());
    }
    let text = format!(
        "an old gradient of shape {:?} on {:?} cannot take one of shape {:?} on {:?}",
        old.size(),
        old.device(),
        new.size(),
        new.device()
    );
    Err(ReplayError::Backward { source: TchError::Shape(text).into() })
}

/// The leaves of open transactions, with the thread that has them and how often: while gradients are aside, another
/// thread's rollout must not take what has been added so far for old ones. The lock is held only to look and to write.
static CLAIMED: LazyLock<Mutex<HashMap<usize, (ThreadId, usize)>>> = LazyLock::new(Mutex::default);

fn claimed() -> MutexGuard<'static, HashMap<usize, (ThreadId, usize)>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A set of leaves in [`CLAIMED`]. A rollout inside a body of another, on one thread, may claim them again.
struct Claim(Vec<usize>);

impl Claim {
    fn new(leaves: &[Tensor]) -> Result<Self, ReplayError> {
        let own = thread::current().id();
        let mut claimed = claimed();
        let taken = |leaf: &&Tensor| claimed.get(&ffi::identity(leaf)).is_some_and(|(thread, _)| *thread != own);
        if let Some(leaf) = leaves.iter().find(taken) {
            return Err(ReplayError::VariableShared { shape: leaf.size() });
        }
        let identities: Vec<_> = leaves.iter().map(ffi::identity).collect();
        for &identity in &identities {
            claimed.entry(identity).or_insert((own, 0)).1 += 1;
        }
        Ok(Self(identities))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = claimed();
        for identity in &self.0 {
            if let Some((_, count)) = claimed.get_mut(identity) {
                *count -= 1;
                if *count == 0 {
                    claimed.remove(identity);
                }
            }
        }
    }
}
