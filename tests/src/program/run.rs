//! Runs a program on LibTorch's own graph: plainly, or as blocks of a rollout.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use replay_runtime::{AutocastGuard, BlockOptions, BoxError, ReplayError, Rollout};
use tch::{Device, Kind, Tensor};

use super::fault::{Broken, attempt};
use super::world::World;
use super::{Block, Numbers, Op, Output, Program, Step};

/// How blocks are run.
pub(super) enum Mode<'r, 'm> {
    /// As plain calls.
    Plain,
    /// As blocks of a rollout.
    Replay(&'r Rollout<'m>),
}

const NAMES: [&str; 3] = ["a", "b", "c"];

/// A forward under way: what its steps have made so far.
pub(super) struct Forward<'p> {
    world: &'p Rc<World>,
    program: &'p Program,
    values: Vec<Tensor>,
    next: usize,
}

impl<'p> Forward<'p> {
    pub(super) fn new(world: &'p Rc<World>, program: &'p Program, leaves: &[Tensor]) -> Self {
        Self { world, program, values: leaves.iter().map(Tensor::shallow_clone).collect(), next: 0 }
    }

    /// Runs the steps that are left. After a failure the same step is the next one again.
    pub(super) fn go_on(&mut self, mode: &Mode<'_, '_>) -> Result<(), Broken> {
        while let Some(step) = self.program.steps.get(self.next) {
            let new = attempt(|| run_step(self.world, mode, step, &self.values, 1).map_err(own_error))?;
            self.values.extend(new);
            self.next += 1;
        }
        Ok(())
    }

    /// How many steps are done.
    pub(super) fn done(&self) -> usize {
        self.next
    }

    pub(super) fn loss(&self) -> Tensor {
        let chosen = self.program.loss_of(self.values.len());
        let tensors: Vec<_> = chosen.into_iter().map(|i| self.values[i].shallow_clone()).collect();
        self.world.loss(&tensors)
    }
}

/// The errors of this module are those of blocks.
fn own_error(error: BoxError) -> ReplayError {
    *error.downcast().expect("only blocks fail")
}

impl Program {
    /// The first so many steps of it.
    pub(super) fn first(&self, steps: usize) -> Self {
        Self { steps: self.steps[..steps].to_vec(), ..self.clone() }
    }

    /// Which of `count` tensors the loss is made of, each once; it names them from the newest on.
    pub(super) fn loss_of(&self, count: usize) -> BTreeSet<usize> {
        self.loss.iter().map(|i| count - 1 - i % count).collect()
    }
}

/// What a step makes. `depth` counts the blocks around it, from one.
fn run_step(
    world: &Rc<World>,
    mode: &Mode<'_, '_>,
    step: &Step,
    values: &[Tensor],
    depth: usize,
) -> Result<Vec<Tensor>, BoxError> {
    match step {
        Step::Op(op, a, b) => {
            let (a, b) = (a % values.len(), b % values.len());
            world.note_op(*op, depth);
            let second = if a == b { values[b].detach() } else { values[b].shallow_clone() };
            Ok(vec![world.apply(*op, &values[a], &second)])
        }
        Step::Block(block) => {
            let inputs: Vec<_> = block.inputs.iter().map(|i| values[i % values.len()].shallow_clone()).collect();
            world.note_block(block, &inputs, values.len(), depth);
            run_block(world, mode, block, &inputs, depth)
        }
    }
}

fn run_block(
    world: &Rc<World>,
    mode: &Mode<'_, '_>,
    block: &Arc<Block>,
    inputs: &[Tensor],
    depth: usize,
) -> Result<Vec<Tensor>, BoxError> {
    let autocast = block.casts(world.numbers, world.kind);
    let guard = autocast.then(|| AutocastGuard::new(Device::Cpu, Kind::BFloat16));
    let mut outputs = match mode {
        Mode::Plain => body(world, mode, block, inputs, depth)?,
        Mode::Replay(rollout) => replayed(world, rollout, block, inputs, depth)?,
    };
    drop(guard);
    if block.changes_output() {
        world.note("in place by the caller");
        World::change(&mut outputs[0]);
    }
    Ok(outputs)
}

fn body(
    world: &Rc<World>,
    mode: &Mode<'_, '_>,
    block: &Arc<Block>,
    inputs: &[Tensor],
    depth: usize,
) -> Result<Vec<Tensor>, BoxError> {
    let mut values: Vec<_> = inputs.iter().map(Tensor::shallow_clone).collect();
    world.strike(block.id, false, depth)?;
    for step in &block.steps {
        let new = run_step(world, mode, step, &values, depth + 1)?;
        values.extend(new);
    }
    world.strike(block.id, true, depth)?;
    let value = |output: &Output| &values[output.source(values.len())];
    Ok(block.outputs.iter().map(|output| world.output(output, value(output))).collect())
}

/// As a block with one to three outputs, which are part of its type.
fn replayed(
    world: &Rc<World>,
    rollout: &Rollout<'_>,
    block: &Arc<Block>,
    inputs: &[Tensor],
    depth: usize,
) -> Result<Vec<Tensor>, BoxError> {
    let name = format!("block {}", block.id);
    let inputs: Vec<_> = NAMES.into_iter().zip(inputs).collect();
    let (world, inner) = (Rc::clone(world), Arc::clone(block));
    let options = BlockOptions::new(name).buffers(block.updates_buffer()).early_stop(world.early_stop);
    let body = move |rollout: &Rollout<'_>, inputs: &[Tensor]| {
        body(&world, &Mode::Replay(rollout), &inner, inputs, depth).map(Vec::into_iter)
    };
    let short = "as many outputs as the program says";
    match block.outputs.len() {
        1 => Ok(vec![rollout.block_with(options, &inputs, move |rollout, i| {
            body(rollout, i).map(|mut out| out.next().expect(short))
        })?]),
        2 => {
            let (a, b) = rollout.block_with(options, &inputs, move |rollout, i| {
                body(rollout, i).map(|mut out| (out.next().expect(short), out.next().expect(short)))
            })?;
            Ok(vec![a, b])
        }
        _ => {
            let (a, b, c) = rollout.block_with(options, &inputs, move |rollout, i| {
                let mut next = body(rollout, i)?;
                let mut next = || next.next().expect(short);
                Ok::<_, BoxError>((next(), next(), next()))
            })?;
            Ok(vec![a, b, c])
        }
    }
}

impl Block {
    /// Whether it runs under autocast. A block around others does not: its own uses of a weight would share one cast.
    pub(super) fn casts(&self, numbers: Numbers, kind: Kind) -> bool {
        self.autocast && numbers == Numbers::Real && kind == Kind::Float && !self.nests()
    }

    /// Whether its body changes the buffer, by itself or in a block inside.
    fn updates_buffer(&self) -> bool {
        self.steps.iter().any(|step| match step {
            Step::Op(op, ..) => *op == Op::Tick,
            Step::Block(block) => block.updates_buffer(),
        })
    }

    /// Whether its body runs blocks.
    pub(super) fn nests(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Block(_)))
    }

    /// Whether its caller changes its first output in place.
    pub(super) fn changes_output(&self) -> bool {
        self.change_output && matches!(self.outputs[0], Output::Doubled(_))
    }
}
