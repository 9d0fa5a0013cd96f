//! The graph of a block's forward, where it is used again: kept with all that it saved, so that there is no replay, or
//! without, to be refilled by a replay that ends early.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{InBlock, ReplayError};
use crate::ffi::{Code, RecordedGraph, ShimError, Tape, Use};
use crate::options::Keep;

/// A recorded graph in the rollout's table.
pub(crate) struct Recorded {
    pub(crate) graph: RecordedGraph,
    pub(crate) tape: Tape,
    /// How a replay brings its tensors, once they are dropped; `None`: the graph goes with them.
    pub(crate) refill: Option<Use>,
    /// The identities of the leaves that take a gradient.
    pub(crate) leaves: Vec<usize>,
}

impl Recorded {
    /// Runs a body that brings the tensors again. `None`: it was ended, or would have been had it not caught the panic or
    /// returned the error by which it is; what it came to then is no matter.
    pub(crate) fn refill<T>(
        &self,
        block: &str,
        run: impl FnOnce() -> Result<T, ReplayError>,
    ) -> Result<Option<T>, ReplayError> {
        let what = self.refill.expect("a graph whose tensors are gone is one that is refilled");
        let filling = self.tape.enter(what).in_block(block, "replay")?;
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let info = self.tape.info();
        drop(filling);
        if info.stopped {
            return Ok(None);
        }
        let mismatch = || self.tape.check_refilled().map_err(|error| graph_mismatch(block, error));
        if !info.usable {
            mismatch()?;
        }
        let value = outcome.unwrap_or_else(|payload| resume_unwind(payload))?;
        mismatch()?;
        Ok(Some(value))
    }
}

fn graph_mismatch(block: &str, error: ShimError) -> ReplayError {
    if error.code == Code::Mismatch {
        ReplayError::GraphMismatch { block: block.to_owned(), what: error.brief }
    } else {
        ReplayError::Torch { block: block.to_owned(), action: "replay", source: error.into() }
    }
}

/// What is done with the graph of a forward that is about to run.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) keep: bool,
    pub(crate) refill: Option<Use>,
}

/// What a forward's body came to.
pub(crate) enum Recording<T> {
    Ended(Result<T, ReplayError>),
    /// It asked for a tensor that the tape has dropped, and is to begin again without one.
    Abandoned,
}

impl Plan {
    /// Runs a forward's body, followed by `tape`.
    pub(crate) fn record<T>(
        self,
        block: &str,
        tape: &Tape,
        run: impl FnOnce() -> Result<T, ReplayError>,
    ) -> Result<Recording<T>, ReplayError> {
        // The way out of a body that asks for what was dropped is a panic, as the way out of its replay.
        let drops = !self.keep && self.refill == Some(Use::Refill { unwinds: true });
        let recording = tape.enter(Use::Record { drops }).in_block(block, "record the graph")?;
        let outcome = catch_unwind(AssertUnwindSafe(run));
        drop(recording);
        if tape.info().abandoned {
            return Ok(Recording::Abandoned);
        }
        Ok(Recording::Ended(outcome.unwrap_or_else(|payload| resume_unwind(payload))))
    }
}

/// The entries whose graphs are kept, oldest first, with their bytes.
#[derive(Default)]
pub(crate) struct KeptGraphs {
    entries: RefCell<VecDeque<(u64, u64)>>,
    bytes: Cell<u64>,
}

impl KeptGraphs {
    pub(crate) fn exceed(&self, keep: Keep) -> bool {
        match keep {
            Keep::None => true,
            Keep::Last(most) => self.entries.borrow().len() > most,
            Keep::Bytes(most) => self.bytes.get() > most,
        }
    }

    pub(crate) fn push(&self, number: u64, bytes: u64) {
        self.entries.borrow_mut().push_back((number, bytes));
        self.bytes.set(self.bytes.get() + bytes);
    }

    pub(crate) fn pop_oldest(&self) -> Option<u64> {
        let (number, bytes) = self.entries.borrow_mut().pop_front()?;
        self.bytes.set(self.bytes.get() - bytes);
        Some(number)
    }

    /// Entry `number` is gone. Backward begins with the newest.
    pub(crate) fn remove(&self, number: u64) {
        let mut entries = self.entries.borrow_mut();
        if let Some(at) = entries.iter().rposition(|(kept, _)| *kept == number)
            && let Some((_, bytes)) = entries.remove(at)
        {
            self.bytes.set(self.bytes.get() - bytes);
        }
    }
}
