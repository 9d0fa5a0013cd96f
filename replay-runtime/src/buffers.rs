//! The stores' variables as blocks last left them, and what becomes of buffers when a block that ran before they were
//! updated is replayed: they get the values they had then, and the present ones again once it is differentiated.

use std::cell::RefCell;
use std::rc::Rc;

use crate::ffi::ShimError;
use crate::store::Store;
use crate::variables::Snapshot;

#[derive(Default)]
pub(crate) struct Watch {
    last: RefCell<Option<Rc<Snapshot>>>,
    /// For replays under way, innermost last.
    replaced: RefCell<Vec<Replaced>>,
}

/// What the end of a replay brings back.
struct Replaced {
    /// Of the entry.
    number: u64,
    found: Rc<Snapshot>,
    /// Nothing was put back for it: it began with what it found.
    same: bool,
}

impl Watch {
    /// The variables as they are now. What changed since the last time was changed by a block if one is `running`.
    pub(crate) fn snapshot(&self, stores: &[&dyn Store], running: bool) -> Result<Rc<Snapshot>, ShimError> {
        let last = self.last.borrow().clone();
        let now = Snapshot::take(stores, last.as_ref(), running)?;
        *self.last.borrow_mut() = Some(Rc::clone(&now));
        Ok(now)
    }

    /// Whether any snapshot was taken, for blocks that will be replayed.
    pub(crate) fn looks(&self) -> bool {
        self.last.borrow().is_some()
    }

    /// Notes the buffers that a block updated which began with `before`.
    pub(crate) fn updated(&self, before: &Rc<Snapshot>) -> Result<(), ShimError> {
        *self.last.borrow_mut() = Some(before.after_block()?);
        Ok(())
    }

    /// The variables as blocks last left them, a block that began with `before` just now.
    pub(crate) fn left(&self, before: &Rc<Snapshot>) -> Rc<Snapshot> {
        self.last.borrow().as_ref().map_or_else(|| Rc::clone(before), Rc::clone)
    }

    /// Compare with this to see whether the variables are as they were `then` or have been updated by blocks alone.
    pub(crate) fn expected(&self, then: &Rc<Snapshot>) -> Rc<Snapshot> {
        match &*self.last.borrow() {
            Some(last) if last.is_of_one_generation(then) => Rc::clone(last),
            _ => Rc::clone(then),
        }
    }

    /// Puts the buffers back to `then` for the replay of entry `number`; they are as in `found`.
    pub(crate) fn begin(&self, number: u64, then: &Rc<Snapshot>, found: &Rc<Snapshot>) -> Result<(), ShimError> {
        let found = found.refreshed()?;
        *self.last.borrow_mut() = Some(Rc::clone(then));
        let same = Rc::ptr_eq(&found, then);
        self.replaced.borrow_mut().push(Replaced { number, found, same });
        if same { Ok(()) } else { then.put_buffers(false) }
    }

    /// A replay ended early, maybe before its body had written all that its graph reads: the buffers become what its
    /// forward `left`, as those of a body that ran to the end are.
    pub(crate) fn complete(&self, left: &Rc<Snapshot>) -> Result<(), ShimError> {
        *self.last.borrow_mut() = Some(Rc::clone(left));
        left.put_buffers(false)
    }

    /// The block of entry `number` was differentiated.
    pub(crate) fn end(&self, number: u64) -> Result<(), ShimError> {
        let ended = self.replaced.borrow_mut().pop_if(|replaced| replaced.number == number);
        // Those inside it have brought back what they found.
        ended.map_or(Ok(()), |Replaced { found, same, .. }| self.bring_back(found, same))
    }

    /// No replay is under way any more, however they ended.
    pub(crate) fn end_all(&self) -> Result<(), ShimError> {
        let outermost = self.replaced.take().into_iter().next();
        outermost.map_or(Ok(()), |Replaced { found, .. }| self.bring_back(found, false))
    }

    /// Makes the buffers what they are in `found`. Their versions are `telling` where none was put back meanwhile.
    fn bring_back(&self, found: Rc<Snapshot>, telling: bool) -> Result<(), ShimError> {
        let outcome = found.put_buffers(telling);
        *self.last.borrow_mut() = Some(found);
        outcome
    }

    pub(crate) fn clear(&self) {
        self.last.take();
    }
}

/// Brings the buffers back to where a forward found them, unless it succeeds.
pub(crate) struct ForwardGuard<'w> {
    watch: &'w Watch,
    found: Option<Rc<Snapshot>>,
}

impl<'w> ForwardGuard<'w> {
    pub(crate) fn new(watch: &'w Watch, found: &Rc<Snapshot>) -> Self {
        Self { watch, found: Some(Rc::clone(found)) }
    }

    pub(crate) fn succeeded(mut self) {
        self.found = None;
    }
}

impl Drop for ForwardGuard<'_> {
    fn drop(&mut self) {
        if let Some(found) = self.found.take() {
            // The forward's own error or panic is on its way, and says more.
            let _ = self.watch.bring_back(found, false);
        }
    }
}
