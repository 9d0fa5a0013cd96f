//! Which graphs a rollout keeps, and what becomes of them in its table.

use crate::context::Contexts;
use crate::error::ReplayError;
use crate::ffi::{ShimError, Tape, Use};
use crate::options::{Check, EarlyStop, Keep};
use crate::recorded::Plan;
use crate::state::{Label, Options, State};

impl Plan {
    /// `None`: it is dropped after the forward.
    ///
    /// `contexts` are those that its replay opens; `in_window`: its parameters come and go.
    pub(crate) fn of(options: &Options, label: &Label, contexts: &Contexts<'_>, in_window: bool) -> Option<Self> {
        // What a graph has saved of such parameters would keep them whole; without its tensors it keeps nothing.
        let keep = !in_window && !matches!(options.keep, Keep::None | Keep::Last(0) | Keep::Bytes(0));
        let refill = refill(options.early_stop, label.early_stop, cfg!(panic = "unwind"));
        // These want all of the body to run.
        let refill =
            refill.filter(|_| contexts.iter().all(|context| context.is_none()) && options.check != Check::Values);
        let wanted = keep || refill.is_some();
        (wanted && Tape::available()).then_some(Self { keep, refill })
    }
}

/// How a replay brings the tensors of a recorded graph; where panics abort, it runs to its end.
fn refill(early_stop: EarlyStop, marked: bool, panics_unwind: bool) -> Option<Use> {
    let unwinds = marked && panics_unwind;
    match early_stop {
        EarlyStop::Off => None,
        EarlyStop::Marked => marked.then_some(Use::Refill { unwinds }),
        EarlyStop::Always => Some(Use::Refill { unwinds }),
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

    /// The entries with recorded graphs, and the ranges of numbers that their nodes have, ascending. No two begin alike: the
    /// node of the block itself comes after its body's.
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

fn left_aside(block: &str) -> String {
    format!(
        "a tensor that replay block `{block}` computed and did not return is being differentiated\nreturn it as an output, or do not mark the block `early_stop`: its graph is without tensors until its replay"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_unwinds_where_panics_abort() {
        for early_stop in [EarlyStop::Off, EarlyStop::Marked, EarlyStop::Always] {
            for marked in [false, true] {
                assert_ne!(refill(early_stop, marked, false), Some(Use::Refill { unwinds: true }));
                let unwinds = refill(early_stop, marked, true) == Some(Use::Refill { unwinds: true });
                assert_eq!(unwinds, marked && early_stop != EarlyStop::Off);
            }
        }
    }
}
