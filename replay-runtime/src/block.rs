//! One call of a block: check the inputs, run the body in grad mode on detached leaves, drop the graph, and put a
//! node before the outputs that can run it all again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

mod checks;

use crate::buffers::ForwardGuard;
use crate::context::{AnyContext, Contexts, run_body};
use crate::error::{InBlock, Pass, ReplayError};
use crate::ffi::{self, Fingerprint, Modes, NodeState, RecordedGraph, ShimError, Tape, Use, WeakTensor};
use crate::leaves::Leaves;
use crate::link::Link;
use crate::modes::ModesGuard;
use crate::options::Check;
use crate::recorded::{Plan, Recorded, Recording};
use crate::rng::{ForwardRng, RngRecord};
use crate::state::{Body, Entry, Failure, InputRecord, Label, OutputRecord, State};
use crate::variables::Snapshot;

/// A call under way.
pub(crate) struct Call<'c, 'm> {
    pub(crate) state: &'c Rc<State<'m>>,
    pub(crate) label: Rc<Label>,
    pub(crate) inputs: &'c [Option<&'c Tensor>],
    pub(crate) context: Rc<dyn AnyContext + 'm>,
    /// Its place in a chain.
    pub(crate) link: Option<Link>,
    pub(crate) body: Rc<Body<'m>>,
}

/// What the forward found out, with its graph still alive. The outputs go first when it is dropped: they hold the graph,
/// which holds the leaves.
struct Forward<'m> {
    outputs: Vec<Tensor>,
    tape: Option<(Plan, Tape)>,
    leaves: Leaves<'m>,
    prints: Vec<Option<Fingerprint>>,
    variables: Rc<Snapshot>,
    left: Rc<Snapshot>,
    modes: Modes,
    rng: RngRecord,
    captured: Vec<(Tensor, Fingerprint)>,
}

/// Puts generators and buffers back unless the whole call succeeds.
struct Undo<'c> {
    rng: ForwardRng,
    buffers: ForwardGuard<'c>,
}

impl Undo<'_> {
    fn succeeded(self) {
        self.rng.succeeded();
        self.buffers.succeeded();
    }
}

impl<'c, 'm> Call<'c, 'm> {
    /// Other processes that wait for this one are told of a failure.
    pub(crate) fn run(&self) -> Result<Vec<Tensor>, ReplayError> {
        if !self.state.windows.any() {
            return self.apply();
        }
        let failure = match catch_unwind(AssertUnwindSafe(|| self.apply())) {
            Ok(Ok(outputs)) => return Ok(outputs),
            Ok(Err(error)) => Failure::Error(error),
            Err(payload) => Failure::Panic(payload),
        };
        self.state.windows.abort(&failure.brief());
        failure.raise()
    }

    fn apply(&self) -> Result<Vec<Tensor>, ReplayError> {
        self.state.sweep();
        self.state.windows.check_begun()?;
        self.check_inputs()?;
        let modes = Modes::current().in_block(&self.label.block, "read the thread's modes")?;
        if self.state.options.inference || !modes.grad || ffi::inference_mode() {
            return self.run_plain();
        }
        self.check_versioned()?;
        let started = Instant::now();
        let (forward, undo) = match self.forward(modes, true)? {
            Some(forward) => forward,
            None => self.forward(modes, false)?.expect("nothing abandons a body that is not recorded"),
        };
        self.state.ledger.borrow_mut().forward(&self.label.block, started.elapsed());
        let outputs = self.hand_out(forward)?;
        undo.succeeded();
        Ok(outputs)
    }

    /// Drops the graph, and puts a node before the outputs that require grad.
    fn hand_out(&self, forward: Forward<'m>) -> Result<Vec<Tensor>, ReplayError> {
        if forward.outputs.iter().all(|output| !output.requires_grad()) {
            return Ok(forward.outputs);
        }
        let records: Vec<_> = forward.outputs.iter().map(OutputRecord::of).collect();
        let outputs = self.detach(&forward)?;
        let recorded: Vec<usize> = (0..records.len()).filter(|&i| records[i].requires_grad).collect();
        let attached: Vec<&Tensor> = recorded.iter().map(|&i| &outputs[i]).collect();
        if self.state.inside_forward() {
            // The outer block's graph is followed and dropped after its forward. So that at most one graph of an inner
            // block lives, the outputs only say that they require grad and what they came from.
            ffi::barrier(self.inputs, &attached).in_block(&self.label.block, "mark the outputs")?;
            self.state.inner_captured.borrow_mut().extend(forward.captured);
        } else {
            self.record(forward, records, &recorded, &attached)?;
        }
        Ok(outputs)
    }

    /// Nothing will be differentiated: the body on the caller's own tensors.
    fn run_plain(&self) -> Result<Vec<Tensor>, ReplayError> {
        let _guard = self.state.options.inference.then(tch::no_grad_guard);
        let inputs: Vec<_> = self.inputs.iter().map(|input| input.map(Tensor::shallow_clone)).collect();
        let own = [Rc::clone(&self.context)];
        let _window = self.state.windows.open(&self.label)?;
        let run = || run_body(&own, &self.label.block, Pass::Forward, || (self.body)(self.state, &inputs));
        // Blocks that were recorded before must learn that it was a block that updated the buffers.
        if !self.label.buffers || !self.state.watch.looks() {
            return run();
        }
        let before = self.state.snapshot().in_block(&self.label.block, "read the variables")?;
        let outputs = run()?;
        self.state.watch.updated(&before).in_block(&self.label.block, "read the variables")?;
        Ok(outputs)
    }

    /// `None`: what it has `recorded` is of no use, and everything is as before. Then it is not recorded again in this rollout.
    fn forward(&self, modes: Modes, recorded: bool) -> Result<Option<(Forward<'m>, Undo<'c>)>, ReplayError> {
        let block = &self.label.block;
        let variables = self.state.snapshot().in_block(block, "read the variables")?;
        if let Some((name, device)) = variables.cuda_device() {
            self.check_device(|| format!("variable `{name}`"), device)?;
        }
        let prints = self.prints()?;
        let leaves = Leaves::of(self.state, &self.label, self.inputs).in_block(block, "detach the inputs")?;
        let cuda = self.state.cuda.get();
        let rng = ForwardRng::begin(self.state.options.rng, cuda, &self.state.rng_states)
            .in_block(block, "read the random number generator")?;

        let buffers = ForwardGuard::new(&self.state.watch, &variables);
        let guard = ModesGuard::enter(&modes).in_block(block, "set the thread's modes")?;
        let since = ffi::sequence();
        let captured_before = self.state.inner_captured.borrow().len();
        let own = [Rc::clone(&self.context)];
        let window = self.state.windows.open(&self.label)?;
        let tape = if recorded { self.tape(&variables).in_block(block, "record the graph")? } else { None };
        let pass = self.state.enter(Pass::Forward, self.contexts());
        let run = || run_body(&own, block, Pass::Forward, || (self.body)(self.state, &leaves));
        let outputs = if let Some((plan, tape)) = &tape {
            plan.record(block, tape, run)?
        } else {
            let _paused = ffi::pause_tapes().in_block(block, "record the graph")?;
            Recording::Ended(run())
        };
        drop(pass);
        drop(guard);
        let inner = self.state.inner_captured.borrow_mut().split_off(captured_before);
        let Recording::Ended(outputs) = outputs else {
            self.state.unrecorded.borrow_mut().insert(Arc::clone(block));
            return Ok(None);
        };
        let outputs = outputs?;
        self.state.windows.check_versions(&self.label)?;

        self.check_outputs(&outputs)?;
        self.check_unwritten(&prints, &leaves, &variables)?;
        let mut captured = self.captured(&outputs, &leaves, &variables, since)?;
        captured.extend(inner);
        drop(window);
        let drawn = rng.record(block, &self.state.rng_states)?;
        let left = if self.label.buffers { self.state.watch.left(&variables) } else { Rc::clone(&variables) };
        let forward = Forward { outputs, tape, leaves, prints, variables, left, modes, rng: drawn, captured };
        Ok(Some((forward, Undo { rng, buffers })))
    }

    /// What records the graph of a forward that is about to run, if it is used again. That of an inner block in an outer
    /// one's forward is not.
    fn tape(&self, variables: &Snapshot) -> Result<Option<(Plan, Tape)>, ShimError> {
        let plan = Plan::of(
            &self.state.options,
            &self.label,
            &self.contexts(),
            self.state.windows.unit(&self.label).is_some(),
        );
        let unrecorded = || self.state.inside_forward() || self.state.unrecorded.borrow().contains(&self.label.block);
        let Some(plan) = plan.filter(|_| !unrecorded()) else { return Ok(None) };
        if plan.refill == Some(Use::Refill { unwinds: true }) && !self.state.quiet.replace(true) {
            ffi::cover_panic_hook();
        }
        self.state.make_room()?;
        // Those that are saved anyway.
        let inputs = &self.inputs[self.states_left_out()..];
        let tape = Tape::new(&self.label.block, inputs, variables.storage_set()?, self.state.cuda.get())?;
        Ok(Some((plan, tape)))
    }

    /// How many inputs, the first ones, are states of a chain that are not saved.
    fn states_left_out(&self) -> usize {
        self.link.as_ref().map_or(0, |link| if link.keeps_states() { 0 } else { link.states() })
    }

    /// Those that a replay of this block opens: of the blocks around it, which are open now, and its own.
    fn contexts(&self) -> Contexts<'m> {
        let mut contexts = self.state.open_contexts();
        contexts.push(Rc::clone(&self.context));
        contexts
    }

    fn prints(&self) -> Result<Vec<Option<Fingerprint>>, ReplayError> {
        let prints = self.inputs.iter().map(|input| input.map(ffi::fingerprint).transpose());
        prints.collect::<Result<_, _>>().in_block(&self.label.block, "read the inputs' versions")
    }

    /// Follows the graph of the outputs to its leaves. Those that are neither inputs nor variables are trainable
    /// tensors that the body captured.
    fn captured(
        &self,
        outputs: &[Tensor],
        leaves: &[Option<Tensor>],
        variables: &Snapshot,
        since: u64,
    ) -> Result<Vec<(Tensor, Fingerprint)>, ReplayError> {
        let block = &self.label.block;
        let roots = outputs.iter().filter(|output| output.requires_grad());
        let inputs: Vec<_> = leaves.iter().flatten().map(ffi::identity).collect();
        let windows = &self.state.windows;
        let known = |identity| {
            inputs.contains(&identity) || variables.knows(identity) || windows.is_whole(identity).unwrap_or(false)
        };
        let found = ffi::graph_since(roots, since, &known).map_err(|error| {
            if error.code == ffi::Code::Captured {
                ReplayError::Captured { block: block.to_string(), operation: error.brief }
            } else {
                let action = "follow the graph";
                ReplayError::Torch { block: block.to_string(), action, source: error.into() }
            }
        })?;
        if let Some(device) = found.cuda {
            self.check_known(device)?;
        }
        let captured = found.leaves.into_iter().map(|(identity, leaf)| {
            self.state.check_not_escaped(identity)?;
            windows.is_whole(identity)?;
            self.state.captured.borrow_mut().insert(identity, WeakTensor::new(&leaf));
            let print = ffi::fingerprint(&leaf).in_block(block, "read a captured tensor")?;
            Ok((leaf, print))
        });
        captured.collect()
    }

    /// The outputs without their graph. One whose storage is known elsewhere too is handed out as a view on which
    /// an in-place operation is an error: its gradient could not follow the change.
    fn detach(&self, forward: &Forward<'m>) -> Result<Vec<Tensor>, ReplayError> {
        let inputs = forward.leaves.iter().flatten();
        let captured = forward.captured.iter().map(|(leaf, _)| leaf);
        let storages: Vec<_> = inputs.chain(captured).chain(&forward.outputs).filter_map(ffi::storage).collect();
        let several = |storage| storages.iter().filter(|&&other| other == storage).count() > 1;
        let aliased = |storage| several(storage) || forward.variables.holds(storage);
        let outputs =
            forward.outputs.iter().map(|output| ffi::detach_output(output, ffi::storage(output).is_some_and(aliased)));
        outputs.collect::<Result<_, _>>().in_block(&self.label.block, "detach the outputs")
    }

    /// Saves the inputs, writes the table's entry and puts the node before the outputs.
    fn record(
        &self,
        forward: Forward<'m>,
        outputs: Vec<OutputRecord>,
        attached_at: &[usize],
        attached: &[&Tensor],
    ) -> Result<(), ReplayError> {
        let state = self.state;
        let Forward { outputs: graph, tape, mut leaves, prints, variables, left, modes, rng, captured } = forward;
        let compared = rng.unproven || state.options.check == Check::Values;
        let values = compared.then(|| graph.iter().map(ffi::copy).collect::<Result<_, _>>()).transpose();
        let values = values.in_block(&self.label.block, "copy the outputs")?;
        let tape = tape.filter(|(plan, _)| captured.is_empty() && (plan.keep || !compared));
        let captured: Vec<_> = captured.into_iter().map(|(leaf, print)| (WeakTensor::new(&leaf), print)).collect();
        let kept = tape.map(|(plan, tape)| self.keep_graph(plan, tape, &graph, attached_at, &mut leaves));
        let kept = kept.transpose().in_block(&self.label.block, "keep the graph")?.flatten();
        drop(graph);
        drop(leaves);
        let (saved, inputs) = self.save(&prints, &variables)?;
        let contexts = self.contexts();
        let block = Arc::clone(&self.label.block);
        let node = NodeState::new(state.new_entry_number(), block, saved, Arc::clone(&state.graveyard));
        let node = Arc::new(node);
        ffi::attach(state.id, &node, self.inputs, attached).in_block(&self.label.block, "attach the node")?;
        let (recorded, keep) = self.settle_graph(kept, compared).in_block(&self.label.block, "keep the graph")?;
        let number = node.entry;
        if let Some(link) = &self.link {
            link.recorded(node.entry);
        }
        state.insert(Entry {
            label: Rc::clone(&self.label),
            link: self.link.clone(),
            body: Rc::clone(&self.body),
            contexts,
            modes,
            rng,
            variables,
            left,
            // One that is gone now, with the graph, was made inside the body.
            captured: captured.into_iter().filter(|(leaf, _)| leaf.upgrade().is_some()).collect(),
            inputs,
            outputs,
            values,
            attached: attached_at.to_vec(),
            recorded,
            node,
        });
        keep.map_or(Ok(()), |bytes| state.keep(number, bytes)).in_block(&self.label.block, "keep the graph")
    }

    /// The graph of `outputs`, if nothing has happened in the body that the tape does not follow.
    fn keep_graph(
        &self,
        plan: Plan,
        tape: Tape,
        outputs: &[Tensor],
        attached_at: &[usize],
        leaves: &mut Leaves<'m>,
    ) -> Result<Option<(Plan, Recorded)>, ShimError> {
        if !tape.info().usable {
            return Ok(None);
        }
        let roots = attached_at.iter().map(|&i| &outputs[i]);
        let graph = RecordedGraph::new(&tape, self.state.id, &self.label.block, roots, leaves)?;
        let leaves = leaves.recorded();
        Ok(Some((plan, Recorded { graph, tape, refill: plan.refill, leaves })))
    }

    /// All that only the forward needed is gone: counts what the graph has saved and drops it, unless it is to be kept; then
    /// the bytes come back too.
    fn settle_graph(
        &self,
        kept: Option<(Plan, Recorded)>,
        compared: bool,
    ) -> Result<(Option<Recorded>, Option<u64>), ShimError> {
        let Some((plan, mut recorded)) = kept else { return Ok((None, None)) };
        recorded.refill = recorded.refill.filter(|_| !compared);
        recorded.graph.end_record()?;
        let info = recorded.tape.info();
        if !info.usable {
            self.state.forget_leaves(&recorded);
            return Ok((None, None));
        }
        self.state.ledger.borrow_mut().recorded(&self.label.block, info.graph_bytes);
        if plan.keep {
            return Ok((Some(recorded), Some(info.bytes)));
        }
        recorded.graph.drop_tensors()?;
        Ok((Some(recorded), None))
    }

    #[expect(clippy::type_complexity, reason = "two lists in step, taken apart at once")]
    fn save(
        &self,
        prints: &[Option<Fingerprint>],
        variables: &Snapshot,
    ) -> Result<(Vec<Option<Arc<ffi::SavedTensor>>>, Vec<Option<InputRecord>>), ReplayError> {
        let block = &self.label.block;
        let mut saved = Vec::new();
        let mut records = Vec::new();
        let left_out = self.states_left_out();
        for (i, (input, print)) in self.inputs.iter().zip(prints).enumerate() {
            let (Some(input), Some(print)) = (input, print) else {
                saved.push(None);
                records.push(None);
                continue;
            };
            if i < left_out {
                let requires_grad = print.requires_grad;
                let print = Fingerprint { requires_grad: false, ..*print };
                records.push(Some(InputRecord { print, requires_grad }));
                saved.push(None);
                continue;
            }
            // A variable stays where it is for the model's sake: a copy on the host would free nothing.
            let held = ffi::storage(input).is_some_and(|storage| variables.holds(storage));
            let on_host = self.state.options.offload && !held;
            let kept = self.state.saved.keep(input, print, on_host, held).in_block(block, "save an input")?;
            self.state.ledger.borrow_mut().saved(block, kept.bytes, kept.saved.is_on_host());
            let print = kept.saved.fingerprint().in_block(block, "save an input")?;
            records.push(Some(InputRecord { print, requires_grad: input.requires_grad() }));
            saved.push(Some(kept.saved));
        }
        Ok((saved, records))
    }
}
