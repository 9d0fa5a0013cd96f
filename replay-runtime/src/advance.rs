//! Steps of a chain that run again for their states alone, because those before a later step were not stored.

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use crate::error::{InBlock, Pass, ReplayError};
use crate::ffi::{self, Fingerprint, SavedTensor};
use crate::leaves::Leaves;
use crate::link::Piece;
use crate::state::{Entry, State};

/// A block's inputs, as its node keeps them.
type Saved = [Option<Arc<SavedTensor>>];

impl<'m> State<'m> {
    /// Completes what is saved for a step of a chain whose states were not stored: runs the steps from the nearest stored
    /// ones on, one after the other, and stores states on the way.
    pub(crate) fn restore_states(&self, entry: &mut Entry<'m>, saved: &mut Saved) -> Result<(), ReplayError> {
        let Some(link) = entry.link.clone() else { return Ok(()) };
        if saved[..link.states()].iter().all(Option::is_some) {
            return Ok(());
        }
        let mut states = None;
        for leg in link.legs() {
            for step in leg.from..leg.to {
                states = Some(self.advance_step(&link.piece, step, states)?);
            }
            if leg.stored {
                self.store_states(&link.piece, leg.to, states.take())?;
            }
        }
        entry.take_states(saved, states, false)
    }

    /// The states behind a step, from those before it; `None`: the stored ones.
    fn advance_step(
        &self,
        piece: &Piece,
        step: usize,
        states: Option<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>, ReplayError> {
        let mut entry = self.entry_of(piece, step)?;
        let mut saved = entry.saved()?;
        entry.take_states(&mut saved, states, false)?;
        let outputs = self.run_for_values(&entry, &saved)?;
        self.insert(entry);
        Ok(outputs)
    }

    fn store_states(&self, piece: &Piece, step: usize, states: Option<Vec<Tensor>>) -> Result<(), ReplayError> {
        let mut entry = self.entry_of(piece, step)?;
        let mut saved = entry.saved()?;
        entry.take_states(&mut saved, states, self.options.offload)?;
        entry.node.put_saved(saved);
        self.insert(entry);
        Ok(())
    }

    /// Takes an entry out of the table. It goes back where nothing fails; otherwise the rollout ends anyway.
    fn entry_of(&self, piece: &Piece, step: usize) -> Result<Entry<'m>, ReplayError> {
        let number = piece.entry(step);
        self.take(number).ok_or_else(|| ReplayError::Used { block: piece.block.to_string() })
    }

    /// Runs a block as its replay would, without keeping its graph, which is built for the sake of equal bits.
    fn run_for_values(&self, entry: &Entry<'m>, saved: &Saved) -> Result<Vec<Tensor>, ReplayError> {
        let (block, number) = (&*entry.label.block, entry.node.entry);
        let found = self.watch.expected(&entry.variables);
        entry.check_unchanged(saved, &found)?;
        let started = Instant::now();
        let leaves = Leaves::again(self.handle(), &entry.label, entry.leaves(saved)?);
        self.watch.begin(number, &entry.variables, &found).in_block(block, "put the buffers back")?;
        let captured = self.inner_captured.borrow().len();
        let outputs = self.run_again(entry, None, &leaves, Pass::Forward)?;
        let outputs = outputs.expect("nothing ends a body that has no graph to fill");
        // The forward has noted what blocks inside capture.
        drop(self.inner_captured.borrow_mut().split_off(captured));
        entry.check_unwritten(saved)?;
        self.watch.end(number).in_block(block, "put the buffers back")?;
        let states = outputs.iter().map(|output| ffi::detach_output(output, false)).collect::<Result<_, _>>();
        drop(outputs);
        drop(leaves);
        self.ledger.borrow_mut().advanced(block, started.elapsed());
        states.in_block(block, "detach the outputs")
    }
}

impl Entry<'_> {
    /// A copy of the list that the node keeps.
    fn saved(&self) -> Result<Vec<Option<Arc<SavedTensor>>>, ReplayError> {
        self.node.saved().ok_or_else(|| ReplayError::Used { block: self.label.block.to_string() })
    }

    /// Puts states that were computed again, if any, in the places of the forward's.
    fn take_states(
        &mut self,
        saved: &mut Saved,
        states: Option<Vec<Tensor>>,
        on_host: bool,
    ) -> Result<(), ReplayError> {
        let block = &*self.label.block;
        let places = saved.iter_mut().zip(&mut self.inputs);
        for (output, (state, (place, record))) in states.into_iter().flatten().zip(places).enumerate() {
            let Some(record) = record else { continue };
            let print = ffi::fingerprint(&state).in_block(block, "read a state")?;
            if differs(&record.print, &print) {
                return Err(ReplayError::ValuesDiffer { block: block.to_owned(), output, difference: f64::NAN });
            }
            let kept = SavedTensor::new(&state, on_host, None).in_block(block, "save a state")?;
            record.print = kept.fingerprint().in_block(block, "save a state")?;
            *place = Some(Arc::new(kept));
        }
        Ok(())
    }
}

/// Whether a sample of the values shows that they are others.
fn differs(forward: &Fingerprint, again: &Fingerprint) -> bool {
    forward.layout == again.layout && forward.sample != again.sample
}
