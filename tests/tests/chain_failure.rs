//! Chains: guarantees *failure*, *once*, *versions*, *determinism* and *errors*, where steps
//! run again for their states.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use replay_runtime::{BlockOptions, BoxError, Chain, Pass, ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, bytes, randn};
use tch::nn::{Module, ModuleT};
use tch::{Device, Kind, Tensor, nn};

const STEPS: usize = 7;
const SLOTS: usize = 2;

struct Model {
    cell: nn::Linear,
    norm: nn::BatchNorm,
    /// How often a body ran, and the run that fails.
    runs: Cell<usize>,
    fails: Cell<Option<(usize, bool)>>,
}

impl Model {
    fn new(path: &nn::Path<'_>) -> Self {
        let cell = nn::linear(path / "cell", 6, 6, nn::LinearConfig::default());
        let norm = nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default());
        Self { cell, norm, runs: Cell::new(0), fails: Cell::new(None) }
    }

    /// Draws, updates buffers, and may fail after both.
    fn step(&self, state: &Tensor) -> Result<Tensor, BoxError> {
        let state = self.norm.forward_t(&self.cell.forward(state).dropout(0.3, true), true);
        match self.fails.get() {
            Some((run, panics)) if run == self.runs.replace(self.runs.get() + 1) => {
                assert!(!panics, "the pump broke");
                Err("the pump is dry".into())
            }
            _ => Ok(state.tanh()),
        }
    }
}

fn setup() -> Setup<Model> {
    Setup::new(Model::new).leaf("start", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

fn run<'m>(rollout: &Rollout<'m>, model: &'m Model, start: &Tensor) -> Result<Tensor, ReplayError> {
    let chain = Chain::new(BlockOptions::new("step").buffers(true), STEPS).slots(SLOTS);
    Ok(rollout.chain(chain, &[("state", start)], |_, _, state| model.step(&state[0]))?.square().sum(Kind::Float))
}

/// All that a failing call may not change: variables, gradients, and what is drawn next.
fn present<M>(setup: &Setup<M>) -> Vec<Vec<u8>> {
    let grads = setup.grads().into_values().map(|grad| grad.map_or(Vec::new(), |grad| bytes(&grad)));
    let variables = setup.trained().into_values().map(|variable| bytes(&variable));
    variables.chain(grads).collect()
}

fn next_draw() -> Vec<u8> {
    bytes(&Tensor::rand([4], (Kind::Float, Device::Cpu)))
}

/// Whichever of the bodies fails that run in the backward pass, to advance or to be differentiated.
#[test]
fn a_failing_run_leaves_everything_as_before_the_backward_pass() {
    let expected = {
        let setup = setup();
        tch::manual_seed(5);
        let rollout = Rollout::new(&setup.vs);
        let loss = run(&rollout, &setup.model, &setup.leaves[0].1).unwrap();
        let report = rollout.backward(&loss).unwrap();
        assert!(report.total.advances > 3);
        (present(&setup), next_draw(), report.total.advances + report.total.replays)
    };
    for (run_of, panics) in (0..expected.2).flat_map(|run| [(run, false), (run, true)]) {
        let setup = setup();
        let (model, start) = (&setup.model, &setup.leaves[0].1);
        tch::manual_seed(5);
        let rollout = Rollout::new(&setup.vs);
        let loss = run(&rollout, model, start).unwrap();
        let before = present(&setup);
        model.runs.set(0);
        model.fails.set(Some((usize::try_from(run_of).unwrap(), panics)));
        let outcome = catch_unwind(AssertUnwindSafe(|| rollout.backward(&loss)));
        match outcome {
            Ok(outcome) => {
                let error = outcome.unwrap_err();
                assert!(
                    matches!(&error, ReplayError::Block { block, pass: Pass::Replay, .. } if block == "step"),
                    "{error}"
                );
                assert!(!panics);
            }
            Err(payload) => assert!(panics && payload.downcast_ref() == Some(&"the pump broke")),
        }
        assert!(present(&setup) == before, "run {run_of}");
        assert_eq!(next_draw(), expected.1, "run {run_of}");
        assert!(Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true).sin().requires_grad());
    }
}

#[test]
fn the_rollout_after_a_failure_is_right() {
    let expected = {
        let setup = setup();
        (0..2).for_each(|_| {
            let rollout = Rollout::new(&setup.vs);
            let loss = run(&rollout, &setup.model, &setup.leaves[0].1).unwrap();
            drop(rollout);
            drop(loss);
        });
        let rollout = Rollout::new(&setup.vs);
        let loss = run(&rollout, &setup.model, &setup.leaves[0].1).unwrap();
        rollout.backward(&loss).unwrap();
        present(&setup)
    };
    let setup = setup();
    let (model, start) = (&setup.model, &setup.leaves[0].1);
    for fails in [2, 5] {
        let rollout = Rollout::new(&setup.vs);
        let loss = run(&rollout, model, start).unwrap();
        model.runs.set(0);
        model.fails.set(Some((fails, false)));
        rollout.backward(&loss).unwrap_err();
        model.fails.set(None);
    }
    let rollout = Rollout::new(&setup.vs);
    let loss = run(&rollout, model, start).unwrap();
    rollout.backward(&loss).unwrap();
    assert!(present(&setup) == expected);
}

/// A step fails in the forward: those before it have run, it has not.
#[test]
fn a_step_that_fails_in_the_forward_leaves_what_its_predecessors_left() {
    let after_three = {
        let setup = setup();
        tch::manual_seed(5);
        let rollout = Rollout::new(&setup.vs);
        let chain = Chain::new(BlockOptions::new("step").buffers(true), 3).slots(SLOTS);
        let states = [("state", &setup.leaves[0].1)];
        let _ = rollout.chain(chain, &states, |_, _, state| setup.model.step(&state[0])).unwrap();
        (present(&setup), next_draw())
    };
    let setup = setup();
    tch::manual_seed(5);
    setup.model.fails.set(Some((3, false)));
    let rollout = Rollout::new(&setup.vs);
    run(&rollout, &setup.model, &setup.leaves[0].1).unwrap_err();
    assert!((present(&setup), next_draw()) == after_three);
}

fn doubling<'m>(rollout: &Rollout<'m>, factor: &'m Cell<f64>, w: &'m Tensor, x: &Tensor, table: &Tensor) -> Tensor {
    let chain = Chain::new("step", STEPS).slots(SLOTS).constant("table", table);
    let last = rollout.chain(chain, &[("state", x)], move |_, _, i| (&i[0] * w * factor.get() + &i[1]).tanh());
    last.unwrap().sum(Kind::Float)
}

fn weight() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[3], nn::Init::Const(0.9)))
}

/// What a step reads unseen has changed: its state, computed again, is not what its forward saw.
#[test]
fn a_step_that_computes_other_values_is_noticed() {
    let (setup, factor) = (weight(), Cell::new(1.0));
    let rollout = Rollout::new(&setup.vs);
    let (x, table) = (Tensor::from_slice(&[1f32, 2.0, 3.0]), Tensor::from(0.1f32));
    let loss = doubling(&rollout, &factor, &setup.model, &x, &table);
    factor.set(1.5);
    let error = rollout.backward(&loss).unwrap_err();
    assert!(matches!(&error, ReplayError::ValuesDiffer { block, output: 0, .. } if block == "step"), "{error}");
    assert!(setup.grads()["w"].is_none());
}

#[test]
fn what_changed_after_the_forward_is_an_error_that_names_it() {
    for changed in ["state", "table", "w"] {
        let (setup, factor) = (weight(), Cell::new(1.0));
        let rollout = Rollout::new(&setup.vs);
        let (mut x, mut table) = (Tensor::from_slice(&[1f32, 2.0, 3.0]), Tensor::from(0.1f32));
        let loss = doubling(&rollout, &factor, &setup.model, &x, &table);
        let _guard = tch::no_grad_guard();
        match changed {
            "state" => drop(x.fill_(7)),
            "table" => drop(table.fill_(7)),
            _ => drop(setup.model.shallow_clone().fill_(7)),
        }
        match rollout.backward(&loss).unwrap_err() {
            ReplayError::InputChanged { block, input } => {
                assert_eq!((block.as_str(), input.as_str()), ("step", changed));
            }
            ReplayError::VariableChanged { variable, .. } => assert_eq!(variable, changed),
            other => panic!("{other}"),
        }
    }
}

/// What a step computes and leaves elsewhere, in whichever of its runs, ends at the step's inputs.
#[test]
fn what_a_step_leaves_aside_is_refused_whichever_run_it_is_from() {
    let setup = weight();
    let aside = RefCell::new(Vec::new());
    let rollout = Rollout::new(&setup.vs);
    let x = Tensor::ones([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let last = rollout.chain(Chain::new("step", STEPS).slots(SLOTS), &[("state", &x)], |_, _, x| {
        let next = (&x[0] * &setup.model).tanh();
        aside.borrow_mut().push((is_replaying(), &next * 2.0));
        next
    });
    let report = rollout.backward(&last.unwrap().sum(Kind::Float)).unwrap();
    let aside = aside.take();
    assert_eq!(aside.iter().filter(|(again, _)| *again).count() as u64, report.total.advances + report.total.replays);
    for (i, (_, tensor)) in aside.iter().enumerate() {
        let text = tensor.sum(Kind::Float).f_backward().unwrap_err().to_string();
        // That of a replay is gone: it has been differentiated.
        assert!(text.contains("`step`") || text.contains("a second time"), "run {i}: {text}");
    }
}

/// A block inside a step is not recorded where the step runs for its state alone.
#[test]
fn an_advance_keeps_nothing_of_the_blocks_inside() {
    let setup = weight();
    let rollout = Rollout::new(&setup.vs);
    let x = Tensor::ones([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let last = rollout.chain(Chain::new("step", STEPS).slots(SLOTS), &[("state", &x)], |rollout, _, x| {
        rollout.block("inner", &[("x", &x[0])], |_, x| (&x[0] * &setup.model).tanh())
    });
    let report = rollout.backward(&last.unwrap().sum(Kind::Float)).unwrap();
    let [(_, inner), (_, step)] = &report.blocks[..] else { panic!("{report}") };
    assert_eq!(inner.forwards, step.forwards + step.advances + step.replays);
    assert_eq!(inner.replays, step.replays);
    // Each state once, by whom it is saved first: the chain that keeps it, or the block in the step's replay.
    assert_eq!(inner.bytes_saved + step.bytes_saved, step.replays * 3 * 4, "{report}");
}

#[test]
fn a_chain_is_differentiated_by_its_rollout_alone() {
    let (setup, factor) = (weight(), Cell::new(1.0));
    let rollout = Rollout::new(&setup.vs);
    let (x, table) = (Tensor::from_slice(&[1f32, 2.0, 3.0]), Tensor::from(0.1f32));
    let loss = doubling(&rollout, &factor, &setup.model, &x, &table);
    let text = loss.f_backward().unwrap_err().to_string();
    assert!(text.contains("`step`") && text.contains("rollout.backward"), "{text}");
    let other = Rollout::new(&setup.vs);
    let error = other.backward(&(&loss * 1.0)).unwrap_err();
    assert!(matches!(error, ReplayError::OtherRollout { .. }), "{error}");
}

#[test]
fn what_is_no_chain_is_an_error() {
    let setup = weight();
    let rollout = Rollout::new(&setup.vs);
    let x = Tensor::from(1f32);
    let one = |chain: Chain<'_>| rollout.chain(chain, &[("x", &x)], |_, _, x| &x[0] * 2.0).unwrap_err();
    assert!(matches!(one(Chain::new("step", 0)), ReplayError::NoStep { block } if block == "step"));
    assert!(matches!(one(Chain::new("step", 3).slots(0)), ReplayError::NoSlot { block } if block == "step"));
    for slots in [1, 5] {
        let chain = Chain::new("step", 3).slots(slots);
        let pair = |_: &Rollout<'_>, _, x: &[Tensor]| (&x[0] * &setup.model, x[0].shallow_clone());
        let error = rollout.chain(chain, &[("x", &x)], pair).unwrap_err();
        let ReplayError::States { block, step: 0, expected: 1, found: 2 } = &error else { panic!("{error}") };
        assert_eq!(block, "step");
    }
    assert!(matches!(
        rollout.chain(Chain::new("step", 3), &[], |_, _, x| x[0].shallow_clone()).unwrap_err(),
        ReplayError::NoInput { .. }
    ));
}
