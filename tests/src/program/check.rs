//! Runs a program by its oracles and replayed, with its failure if it has one, and compares.

use std::collections::BTreeMap;
use std::rc::Rc;

use replay_runtime::{Check, ReplayError, Rollout};
use tch::{Kind, Tensor};

use super::associates::associates;
use super::blockwise;
use super::census::Census;
use super::fault::{Broken, Fault, attempt, disturbed_modes, quietly, text};
use super::run::{Forward, Mode};
use super::world::{Fresh, World, draw};
use super::{Numbers, Program};
use crate::{MODES, Outcome, same_bits};

/// Integers beyond this may have been rounded somewhere on the way.
const SURELY_EXACT: f64 = 1e12;

/// Runs a program in every way, and counts what it did.
///
/// # Errors
/// What differs from an oracle, or is not as it was after a failure.
pub fn check(program: &Program, census: &mut Census) -> Result<(), String> {
    quietly(|| compare(program, census)).unwrap_or_else(|payload| Err(format!("panic: {}", text(&*payload))))
}

fn compare(program: &Program, census: &mut Census) -> Result<(), String> {
    let mut oracles = vec![("blockwise", blockwise::outcome(program))];
    if associates(program) {
        let plain = plain(program);
        if program.numbers == Numbers::Real || largest(&plain) < SURELY_EXACT {
            oracles.push(("plain", plain));
        }
    }
    let run = Run::new(program);
    let found = run.outcome()?;
    for (name, expected) in &oracles {
        if let Some(difference) = difference(expected, &found) {
            return Err(format!("not as by {name} autograd: {difference}"));
        }
        run.world.note(if *name == "plain" {
            "compared with plain autograd"
        } else {
            "compared with blockwise autograd"
        });
    }
    if oracles.len() > 1 && program.numbers == Numbers::Real {
        run.world.note("real numbers compared with plain autograd");
    }
    run.world.note_program(program);
    census.add(run.world.seen.take());
    Ok(())
}

/// By LibTorch's autograd over the whole graph.
fn plain(program: &Program) -> Outcome {
    let fresh = Fresh::new(program, Fault::new(None));
    let (leaves, trained) = (fresh.leaves, fresh.trained);
    let world = Rc::new(fresh.world);
    let mut loss = Tensor::new();
    for round in 0..program.rollouts {
        program.start_round(&world, round);
        let mut forward = Forward::new(&world, program, &leaves);
        succeed(forward.go_on(&Mode::Plain));
        loss = forward.loss();
        if loss.requires_grad() {
            loss.backward();
            part(&trained);
        }
    }
    Outcome::of(&loss, &trained, &world)
}

/// Gives each gradient storage of its own. LibTorch may give two leaves one, and then adds to both what the next pass has
/// for each.
fn part(trained: &BTreeMap<String, Tensor>) {
    for grad in trained.values().map(Tensor::grad).filter(Tensor::defined) {
        let copy = grad.copy();
        tch::no_grad(|| grad.shallow_clone().set_data(&copy));
    }
}

fn succeed<T>(outcome: Result<T, Broken>) -> T {
    outcome.unwrap_or_else(|broken| panic!("the program itself fails: {}", broken.describe()))
}

/// A program that is replayed.
struct Run<'p> {
    program: &'p Program,
    vs: tch::nn::VarStore,
    world: Rc<World>,
    leaves: Vec<Tensor>,
    trained: BTreeMap<String, Tensor>,
}

impl<'p> Run<'p> {
    fn new(program: &'p Program) -> Self {
        let Fresh { vs, world, leaves, trained } = Fresh::new(program, Fault::new(program.failure.clone()));
        Self { program, vs, world: Rc::new(world), leaves, trained }
    }

    /// All rollouts; one that fails is run again.
    fn outcome(&self) -> Result<Outcome, String> {
        let mut loss = Tensor::new();
        for round in 0..self.program.rollouts {
            let before = self.gradients();
            loss = match self.round(round, &before)? {
                Some(loss) => loss,
                None => self.round(round, &before)?.ok_or("a program fails once")?,
            };
        }
        Ok(Outcome::of(&loss, &self.trained, &self.world))
    }

    /// One rollout; `None` if it failed as it should.
    fn round(&self, round: usize, before: &Gradients) -> Result<Option<Tensor>, String> {
        self.program.start_round(&self.world, round);
        let mode = MODES[self.program.mode];
        let check = if self.program.compared { Check::Values } else { Check::default() };
        let builder = Rollout::builder(&self.vs).check(check);
        let rollout = builder.keep_graphs(mode.keep).early_stop(mode.early_stop).build();
        self.world.note_if(self.program.compared, "outputs compared");
        let mut forward = Forward::new(&self.world, self.program, &self.leaves);
        if let Err(broken) = forward.go_on(&Mode::Replay(&rollout)) {
            self.check_failed(&broken, (round, forward.done()), before)?;
            self.world.note("failures in a forward");
            if !self.program.failure.as_ref().is_some_and(|failure| failure.retry) {
                return Ok(None);
            }
            self.world.note("rollouts that go on after a failure");
            let _ = self.stand_after(round, forward.done());
            forward.go_on(&Mode::Replay(&rollout)).map_err(|broken| broken.describe())?;
        }
        let loss = forward.loss();
        let trains = loss.requires_grad();
        match attempt(|| rollout.backward(&loss)) {
            Ok(report) if trains => {
                self.world.note_if(report.total.kept > 0, "graphs kept");
                self.world.note_if(report.total.stopped > 0, "replays ended early");
                Ok(Some(loss))
            }
            Err(Broken::Error(ReplayError::LossWithoutGrad)) if !trains => Ok(Some(loss)),
            Ok(_) => Err("a loss without grad was differentiated".to_owned()),
            Err(broken) => {
                self.check_failed(&broken, (round, self.program.steps.len()), before)?;
                self.world.note("failures in a replay");
                Ok(None)
            }
        }
    }

    /// Everything must be as before the call that failed, which was after `done` steps.
    fn check_failed(&self, broken: &Broken, (round, done): (usize, usize), before: &Gradients) -> Result<(), String> {
        if !self.world.fault.explains(broken) {
            return Err(broken.describe());
        }
        let stream = draw();
        if let Some(what) = disturbed_modes() {
            return Err(format!("after a failure {what}"));
        }
        let buffer = self.stand_after(round, done);
        if !same_bits(&buffer, &self.world.clock) {
            return Err(format!("a failure after {done} steps left {} in the buffer, not {buffer}", self.world.clock));
        }
        if !same_bits(&stream, &draw()) {
            return Err(format!("a failure after {done} steps disturbed the random stream"));
        }
        before.difference(&self.gradients()).map_or(Ok(()), Err)
    }

    /// Puts the generator where it stands in a rollout after so many steps, and says what the buffer is then.
    fn stand_after(&self, round: usize, steps: usize) -> Tensor {
        let part = self.program.first(steps);
        let fresh = Fresh::new(&part, Fault::new(None));
        let world = Rc::new(fresh.world);
        part.start_round(&world, round);
        succeed(Forward::new(&world, &part, &fresh.leaves).go_on(&Mode::Plain));
        world.clock.shallow_clone()
    }

    fn gradients(&self) -> Gradients {
        let look = |tensor: &Tensor| {
            let grad = Some(tensor.grad()).filter(Tensor::defined);
            grad.map(|grad| (grad.copy(), grad.data_ptr().addr()))
        };
        Gradients(self.trained.iter().map(|(name, tensor)| (name.clone(), look(tensor))).collect())
    }
}

/// Gradients and where they are.
struct Gradients(BTreeMap<String, Option<(Tensor, usize)>>);

impl Gradients {
    fn difference(&self, now: &Self) -> Option<String> {
        let same = |name: &String| match (&self.0[name], &now.0[name]) {
            (None, None) => true,
            (Some((a, place)), Some((b, place_now))) => same_bits(a, b) && place == place_now,
            _ => false,
        };
        let changed = self.0.keys().find(|name| !same(name))?;
        Some(format!("a failure changed the gradient of {changed}"))
    }
}

/// The first thing that differs.
fn difference(expected: &Outcome, found: &Outcome) -> Option<String> {
    if !same_bits(&expected.loss, &found.loss) {
        return Some(format!("loss: {} instead of {}", found.loss, expected.loss));
    }
    expected.grads.iter().find_map(|(name, expected)| match (expected, &found.grads[name]) {
        (None, None) => None,
        (Some(a), Some(b)) if same_bits(a, b) => None,
        (Some(a), Some(b)) => Some(format!("{name}:\n{b}instead of\n{a}")),
        (a, b) => Some(format!("{name} has a gradient: {} instead of {}", b.is_some(), a.is_some())),
    })
}

/// The largest number in an outcome; infinite where it is none.
fn largest(outcome: &Outcome) -> f64 {
    let size = |tensor: &Tensor| {
        if tensor.numel() == 0 { 0.0 } else { tensor.abs().max().to_kind(Kind::Double).double_value(&[]) }
    };
    let numbers = outcome.grads.values().flatten().chain([&outcome.loss]).map(size);
    numbers.fold(0.0, |largest, number| if number.is_finite() { f64::max(largest, number) } else { f64::INFINITY })
}
