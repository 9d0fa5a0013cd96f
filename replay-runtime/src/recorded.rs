//! The graph of a block's forward, where it is used again: kept with all that it saved, so that there is no replay, or
//! without, to be refilled by a replay that ends early.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::context::AnyContext;
use crate::error::{InBlock, ReplayError};
use crate::ffi::{Code, RecordedGraph, ShimError, Tape, Use};
use crate::options::{Check, EarlyStop, Keep};
use crate::state::{Label, Options, State};

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

fn left_aside(block: &str) -> String {
    format!(
        "a tensor that replay block `{block}` computed and did not return is being differentiated\nreturn it as an output, or do not mark the block `early_stop`: its graph is without tensors until its replay"
    )
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

    /// `None`: it is dropped after the forward.
    pub(crate) fn of(options: &Options, label: &Label, context: &dyn AnyContext) -> Option<Self> {
        let keep = !matches!(options.keep, Keep::None | Keep::Last(0) | Keep::Bytes(0));
        let unwinds = label.early_stop && cfg!(panic = "unwind");
        let refill = match options.early_stop {
            EarlyStop::Off => None,
            EarlyStop::Marked => label.early_stop.then_some(Use::Refill { unwinds }),
            EarlyStop::Always => Some(Use::Refill { unwinds }),
        };
        // These want all of the body to run.
        let refill = refill.filter(|_| context.is_none() && options.check != Check::Values);
        let wanted = keep || refill.is_some();
        (wanted && Tape::available()).then_some(Self { keep, refill })
    }
}

/// The entries whose graphs are kept, oldest first, with their bytes.
#[derive(Default)]
pub(crate) struct KeptGraphs {
    entries: RefCell<VecDeque<(u64, u64)>>,
    bytes: Cell<u64>,
}

impl KeptGraphs {
    fn exceed(&self, keep: Keep) -> bool {
        match keep {
            Keep::None => true,
            Keep::Last(most) => self.entries.borrow().len() > most,
            Keep::Bytes(most) => self.bytes.get() > most,
        }
    }

    fn push(&self, number: u64, bytes: u64) {
        self.entries.borrow_mut().push_back((number, bytes));
        self.bytes.set(self.bytes.get() + bytes);
    }

    fn pop_oldest(&self) -> Option<u64> {
        let (number, bytes) = self.entries.borrow_mut().pop_front()?;
        self.bytes.set(self.bytes.get() - bytes);
        Some(number)
    }

    /// Entry `number` is gone. Backward begins with the newest.
    fn remove(&self, number: u64) {
        let mut entries = self.entries.borrow_mut();
        if let Some(at) = entries.iter().rposition(|(kept, _)| *kept == number)
            && let Some((_, bytes)) = entries.remove(at)
        {
            self.bytes.set(self.bytes.get() - bytes);
        }
    }
}

impl State<'_> {
    /// Before a forward: no more graphs than leave room for its own.
    pub(crate) fn make_room(&self) -> Result<(), ShimError> {
        match self.options.keep {
            Keep::Last(most) => self.evict_while(Keep::Last(most.saturating_sub(1))),
            Keep::None | Keep::Bytes(_) => Ok(()),
        }
    }

    /// The graph of entry `number` is kept, as far as the budget goes.
    pub(crate) fn keep(&self, number: u64, bytes: u64) -> Result<(), ShimError> {
        self.kept.push(number, bytes);
        self.evict_while(self.options.keep)
    }

    fn evict_while(&self, exceeded: Keep) -> Result<(), ShimError> {
        while self.kept.exceed(exceeded) {
            let Some(oldest) = self.kept.pop_oldest() else { break };
            self.evict(oldest)?;
        }
        Ok(())
    }

    /// The entries with recorded graphs, and the ranges of numbers that their nodes have, ascending.
    pub(crate) fn recorded_spans(&self) -> (Vec<u64>, Vec<[u64; 2]>) {
        let mut found = self.recorded_infos();
        found.sort_by_key(|(_, info)| info.first_node);
        found.into_iter().map(|(number, info)| (number, [info.first_node, info.end_node])).unzip()
    }

    /// The loss depends on something that the body of entry `number` left aside. Where its graph is kept, that is
    /// differentiated by plain autograd, which uses the graph up, and the block is replayed.
    pub(crate) fn left_aside(&self, number: u64) -> Result<(), ReplayError> {
        let given_up = self.with_entry(number, |entry| {
            if entry.recorded.as_ref().is_some_and(|recorded| !recorded.tape.info().filled) {
                return Err(ReplayError::LeftAside { message: left_aside(&entry.label.block) });
            }
            Ok(entry.recorded.take())
        });
        if let Some(recorded) = given_up.transpose()?.flatten() {
            self.forget_recorded(number, &recorded);
        }
        Ok(())
    }

    /// Entry `number` leaves the table with `recorded`.
    pub(crate) fn forget_recorded(&self, number: u64, recorded: &Recorded) {
        self.kept.remove(number);
        self.forget_leaves(recorded);
    }

    /// Its leaves have lived on for its own sake, which is over.
    pub(crate) fn forget_leaves(&self, recorded: &Recorded) {
        let mut escaped = self.escaped.borrow_mut();
        for leaf in &recorded.leaves {
            escaped.remove(leaf);
        }
    }

    /// The graph of entry `number` gives way: it is dropped, or waits for its replay without its tensors.
    fn evict(&self, number: u64) -> Result<(), ShimError> {
        let mut outcome = Ok(());
        let dropped = self.with_entry(number, |entry| {
            if let Some(recorded) = entry.recorded.as_ref().filter(|recorded| recorded.refill.is_some()) {
                outcome = recorded.graph.drop_tensors();
                return None;
            }
            entry.recorded.take()
        });
        if let Some(recorded) = dropped.flatten() {
            self.forget_leaves(&recorded);
        }
        outcome
    }
}
