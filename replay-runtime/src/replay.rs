//! One replay: check that nothing it starts from has changed, put the thread where the forward was, run the body
//! on fresh leaves, and hand its graph back to be differentiated. Called by the engine through the block's node.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use crate::context::{ReplayingGuard, run_body};
use crate::error::{InBlock, Pass, ReplayError};
use crate::ffi::{self, NodeState, Replayed, Replayer, SavedTensor, ShimError};
use crate::modes::ModesGuard;
use crate::recorded::Recorded;
use crate::rng::ReplayRng;
use crate::state::{Entry, Failure, OutputRecord, State};
use crate::variables::{self, Snapshot, difference};

impl Replayer for State<'_> {
    fn replay(&self, node: &NodeState, grads: &[Option<Tensor>], out: &mut Replayed) -> Option<()> {
        let outcome = self.replay_block(node, grads, out);
        self.sweep();
        outcome.map_err(|error| self.fail(Failure::Error(error))).ok()
    }

    fn finished(&self, node: &NodeState, time: Duration) {
        self.ledger.borrow_mut().differentiated(&node.block, time);
        if let Err(error) = self.windows.settle(node.entry) {
            self.fail(Failure::Error(error));
        }
        if let Err(error) = self.watch.end(node.entry).in_block(&node.block, "put the buffers back") {
            self.fail(Failure::Error(error));
        }
    }

    fn panicked(&self, payload: Box<dyn Any + Send>) {
        self.fail(Failure::Panic(payload));
    }
}

impl<'m> State<'m> {
    fn replay_block(&self, node: &NodeState, grads: &[Option<Tensor>], out: &mut Replayed) -> Result<(), ReplayError> {
        let entry = self.remove(node.entry);
        let Some((mut entry, mut saved)) = entry.zip(node.take_saved()) else {
            return Err(ReplayError::Used { block: node.block.to_string() });
        };
        if grads.iter().all(Option::is_none) {
            return Ok(());
        }
        // What a caller has changed in place, an output perhaps, a replay computes again.
        let recorded = entry.recorded.take().filter(|recorded| recorded.tape.info().intact);
        let kept = recorded.as_ref().map(|recorded| recorded.tape.info()).filter(|info| info.filled);
        if kept.is_none() {
            self.restore_states(&mut entry, &mut saved)?;
        }
        let found = self.watch.expected(&entry.variables);
        entry.check_unchanged(&saved, &found)?;

        // A replay finds the buffers as its forward did, a kept graph as that left them.
        let then = if kept.is_some() { &entry.left } else { &entry.variables };
        self.watch.begin(node.entry, then, &found).in_block(&node.block, "put the buffers back")?;
        if let Some(kept) = kept {
            // Its gradients are those of whole parameters.
            self.windows.keep(node.entry, self.windows.open(&entry.label)?);
            self.ledger.borrow_mut().kept(&node.block, kept.bytes);
        } else {
            let replayed = self.replay_entry(&entry, recorded.as_ref(), &saved)?;
            if let Some((outputs, leaves)) = replayed.filter(|_| recorded.is_none()) {
                return entry
                    .hand_back(&outputs, grads, &leaves, out)
                    .in_block(&node.block, "hand its graph to autograd");
            }
        }
        let graph = recorded.expect("only a recorded graph makes up for one that was built").graph;
        out.push_graph(graph, grads).in_block(&node.block, "hand its graph to autograd")
    }

    /// Runs the block again, to its end unless what was recorded is full before; outputs and leaves where it came to its end.
    fn replay_entry(
        &self,
        entry: &Entry<'m>,
        recorded: Option<&Recorded>,
        saved: &[Option<Arc<SavedTensor>>],
    ) -> Result<Option<Ended>, ReplayError> {
        let block = &entry.label.block;
        let started = Instant::now();
        let leaves = entry.leaves(saved)?;
        let outputs = self.run_again(entry, recorded, &leaves, Pass::Replay)?;
        entry.check_unwritten(saved)?;
        if entry.label.buffers && outputs.is_none() {
            self.watch.complete(&entry.left).in_block(block, "put the buffers back")?;
        } else if entry.label.buffers {
            self.watch.updated(&entry.variables).in_block(block, "read the variables")?;
        }
        self.ledger.borrow_mut().replayed(block, started.elapsed(), outputs.is_none());
        Ok(outputs.map(|outputs| (outputs, leaves)))
    }

    /// Runs the body under the modes, generators and context of its forward. All of them end before the block is
    /// differentiated, which happens under the caller's, as in plain autograd. With [`Pass::Forward`] its graph will be
    /// dropped, and blocks inside behave as in a forward. `None`: the body was ended early.
    pub(crate) fn run_again(
        &self,
        entry: &Entry<'m>,
        recorded: Option<&Recorded>,
        leaves: &[Option<Tensor>],
        graph: Pass,
    ) -> Result<Option<Vec<Tensor>>, ReplayError> {
        let block = &*entry.label.block;
        let generators = ReplayRng::begin(&entry.rng).in_block(block, "set the random number generator")?;
        let modes = ModesGuard::enter(&entry.modes).in_block(block, "set the thread's modes")?;
        let window = self.windows.open(&entry.label)?;
        if graph == Pass::Replay && window.is_some() {
            self.windows.look_ahead()?;
        }
        let pass = self.enter(graph, entry.contexts.clone());
        let replaying = ReplayingGuard::enter();
        let run = || run_body(&entry.contexts, block, Pass::Replay, || (entry.body)(&self.handle(), leaves));
        let outcome = match recorded {
            None => ffi::pause_tapes().in_block(block, "replay").and_then(|_paused| run().map(Some)),
            Some(recorded) => recorded.refill(block, run),
        };
        drop((replaying, pass, modes));
        let outputs = outcome?;
        self.windows.check_versions(&entry.label)?;
        if graph == Pass::Replay {
            self.windows.keep(entry.node.entry, window);
        }
        let Some(outputs) = outputs else {
            generators.check_stopped(block, recorded.is_none_or(|recorded| recorded.tape.info().generators_agree))?;
            return Ok(None);
        };
        generators.check(block)?;
        entry.check_outputs(&outputs)?;
        entry.check_values(&outputs)?;
        Ok(Some(outputs))
    }
}

/// The outputs of a replay that ran to the end, and the leaves that it ran on.
type Ended = (Vec<Tensor>, Vec<Option<Tensor>>);

/// What is not as the forward left it.
enum Change {
    /// The input of that name.
    Input(String),
    /// A tensor that the body captured, described, and what of it.
    Captured(String, &'static str),
}

impl Entry<'_> {
    /// New leaves with the saved values.
    pub(crate) fn leaves(&self, saved: &[Option<Arc<SavedTensor>>]) -> Result<Vec<Option<Tensor>>, ReplayError> {
        let leaves = saved.iter().zip(&self.inputs).map(|(saved, record)| {
            let requires_grad = record.is_some_and(|record| record.requires_grad);
            saved.as_ref().map(|saved| saved.leaf(requires_grad)).transpose()
        });
        leaves.collect::<Result<_, _>>().in_block(&self.label.block, "restore the inputs")
    }

    /// The first of inputs and captured tensors that is not as the forward left it.
    fn change(&self, saved: &[Option<Arc<SavedTensor>>]) -> Result<Option<Change>, ReplayError> {
        let block = &self.label.block;
        for (i, (saved, record)) in saved.iter().zip(&self.inputs).enumerate() {
            let (Some(saved), Some(record)) = (saved, record) else { continue };
            if saved.fingerprint().in_block(block, "read an input's version")? != record.print {
                return Ok(Some(Change::Input(self.label.inputs[i].clone())));
            }
        }
        for (weak, before) in &self.captured {
            let Some(tensor) = weak.upgrade() else {
                return Ok(Some(Change::Captured("a captured tensor".to_owned(), "it is gone")));
            };
            let now = ffi::fingerprint(&tensor).in_block(block, "read a captured tensor")?;
            if let Some(what) = difference(before, &now) {
                return Ok(Some(Change::Captured(format!("captured tensor of shape {:?}", tensor.size()), what)));
            }
        }
        Ok(None)
    }

    /// Before the replay, everything that it starts from must be as it was; variables as `expected`, which says what
    /// blocks have made of them since.
    pub(crate) fn check_unchanged(
        &self,
        saved: &[Option<Arc<SavedTensor>>],
        expected: &Snapshot,
    ) -> Result<(), ReplayError> {
        let block = self.label.block.to_string();
        if let Some(change) = expected.change().in_block(&block, "read the variables")? {
            let variables::Change { variable, what, .. } = change;
            return Err(ReplayError::VariableChanged { block, variable, what });
        }
        match self.change(saved)? {
            None => Ok(()),
            Some(Change::Input(input)) => Err(ReplayError::InputChanged { block, input }),
            Some(Change::Captured(variable, what)) => Err(ReplayError::VariableChanged { block, variable, what }),
        }
    }

    /// And after it too: what it changes, the forward has changed before it, unseen.
    pub(crate) fn check_unwritten(&self, saved: &[Option<Arc<SavedTensor>>]) -> Result<(), ReplayError> {
        let block = self.label.block.to_string();
        if let Some(error) = self.label.written(&self.variables)? {
            return Err(error);
        }
        match self.change(saved)? {
            None => Ok(()),
            Some(Change::Input(input)) => Err(ReplayError::InputWritten { block, input }),
            Some(Change::Captured(variable, what)) => Err(ReplayError::VariableWritten { block, variable, what }),
        }
    }

    fn check_outputs(&self, outputs: &[Tensor]) -> Result<(), ReplayError> {
        let mismatch = |what: String, expected: String, found: String| {
            Err(ReplayError::OutputMismatch { block: self.label.block.to_string(), what, expected, found })
        };
        if outputs.len() != self.outputs.len() {
            let (expected, found) = (self.outputs.len(), outputs.len());
            return mismatch("number of outputs".to_owned(), expected.to_string(), found.to_string());
        }
        for (i, (output, expected)) in outputs.iter().zip(&self.outputs).enumerate() {
            if !output.defined() {
                return Err(ReplayError::UndefinedOutput { block: self.label.block.to_string(), output: i });
            }
            let found = OutputRecord::of(output);
            if found != *expected {
                return mismatch(format!("output {i}"), expected.to_string(), found.to_string());
            }
        }
        Ok(())
    }

    fn check_values(&self, outputs: &[Tensor]) -> Result<(), ReplayError> {
        let values = self.values.iter().flatten();
        let differs = |(_, (output, value)): &(usize, (&Tensor, &Tensor))| !ffi::same_bits(output, value);
        match outputs.iter().zip(values).enumerate().find(differs) {
            None => Ok(()),
            Some((i, (output, value))) => Err(ReplayError::ValuesDiffer {
                block: self.label.block.to_string(),
                output: i,
                difference: largest_difference(output, value),
            }),
        }
    }

    /// The outputs to differentiate with the gradients that arrived for them, and the leaves of the inputs.
    fn hand_back(
        &self,
        outputs: &[Tensor],
        grads: &[Option<Tensor>],
        leaves: &[Option<Tensor>],
        replayed: &mut Replayed,
    ) -> Result<(), ShimError> {
        for (&i, grad) in self.attached.iter().zip(grads) {
            if let Some(grad) = grad {
                replayed.push_root(&outputs[i], grad)?;
            }
        }
        for (i, leaf) in leaves.iter().enumerate() {
            if let Some(leaf) = leaf.as_ref().filter(|leaf| leaf.requires_grad()) {
                replayed.push_leaf(i, leaf)?;
            }
        }
        Ok(())
    }
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    let wide = |tensor: &Tensor| {
        let kind = if tensor.is_complex() { Kind::ComplexDouble } else { Kind::Double };
        tensor.detach().to_dense(None::<Kind>, false).to_kind(kind)
    };
    let _guard = tch::no_grad_guard();
    (wide(a) - wide(b)).abs().max().double_value(&[])
}

/// What the engine reported, as far as no block's own failure says more.
pub(crate) fn engine_error(error: ShimError) -> ReplayError {
    match error.code {
        ffi::Code::OtherRollout => ReplayError::OtherRollout { message: error.brief },
        ffi::Code::ForeignBackward => ReplayError::ForeignBackward { message: error.brief },
        ffi::Code::Escaped => ReplayError::LeftAside { message: error.brief },
        ffi::Code::Thread => ReplayError::Thread { message: error.brief },
        _ => ReplayError::Backward { source: error.into() },
    }
}
