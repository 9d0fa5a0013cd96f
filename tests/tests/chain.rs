//! Chains: guarantees *values*, *random numbers*, *modes*, *buffers* and *no grad* for any number of slots, and that steps
//! run as seldom as the schedule says.
//!
//! Where weights are used once in a step, and a state at most twice, gradients have plain autograd's bits; under autocast a
//! step casts for itself and so is compared with blockwise autograd.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use replay_runtime::{AutocastGuard, BlockOptions, Chain, Check, Keep, ReplayError, Rollout, is_replaying};
use replay_tests::{How, Oracle, Setup, assert_exact, bytes, randn, same_bits};
use tch::nn::{Module, ModuleT};
use tch::{Device, Kind, Tensor, nn};

const STEPS: usize = 9;
const ACTIONS: [i64; 3] = [9, 5, 2];

fn cell(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path / "cell", 8, 6, nn::LinearConfig::default())
}

fn setup() -> Setup<nn::Linear> {
    Setup::new(cell)
        .leaf("start", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
        .leaf("actions", randn(3, &ACTIONS, Kind::Float).set_requires_grad(true))
}

/// A state and a loss that every step adds to.
type Pair = (Tensor, Tensor);

/// Runs a chain of pairs with a constant; where nothing is replayed, its steps as blocks.
fn chain<'m>(
    how: &How<'_, 'm>,
    chain: Chain<'_>,
    start: &Tensor,
    actions: &Tensor,
    body: impl Fn(i64, &[Tensor]) -> Pair + Clone + 'm,
) -> Tensor {
    let zero = Tensor::from(0f32);
    if let How::Replay(rollout) = how {
        let chain = chain.constant("actions", actions);
        let states = [("state", start), ("loss", &zero)];
        return rollout.chain(chain, &states, move |_, i, inputs| body(i, inputs)).expect("the chain succeeds").1;
    }
    let mut states = (start.shallow_clone(), zero);
    for i in (0..).take(STEPS) {
        let body = body.clone();
        let inputs = [("state", &states.0), ("loss", &states.1), ("actions", actions)];
        states = how.block("step", &inputs, move |inputs| body(i, inputs));
    }
    states.1
}

fn advance(cell: &nn::Linear, i: i64, inputs: &[Tensor]) -> Pair {
    let [state, loss, actions] = inputs else { panic!("{} inputs", inputs.len()) };
    let state = cell.forward(&Tensor::cat(&[state, &actions.get(i)], 1)).tanh();
    let loss = loss + state.square().mean(Kind::Float);
    (state, loss)
}

/// With so many slots, and with one for each step.
fn chains() -> impl Iterator<Item = Chain<'static>> {
    let all = Chain::new("step", STEPS);
    (1..=STEPS + 1).map(|slots| Chain::new("step", STEPS).slots(slots)).chain([all])
}

#[test]
fn any_number_of_slots_gives_the_same_bits() {
    for oracle in [Oracle::Plain, Oracle::Blockwise] {
        for slots in chains() {
            assert_exact(oracle, setup, |how, model, leaves| {
                chain(how, slots.clone(), &leaves[0].1, &leaves[1].1, |i, inputs| advance(model, i, inputs))
            });
        }
    }
}

#[test]
fn steps_that_run_again_draw_what_they_drew() {
    for slots in chains() {
        assert_exact(Oracle::Plain, setup, |how, model, leaves| {
            tch::manual_seed(11);
            let loss = chain(how, slots.clone(), &leaves[0].1, &leaves[1].1, |i, inputs| {
                let (state, loss) = advance(model, i, inputs);
                // Not every step draws.
                (if i % 3 == 1 { state } else { state.dropout(0.4, true) }, loss)
            });
            let next = Tensor::rand([3], (Kind::Float, Device::Cpu));
            loss + next.sum(Kind::Float)
        });
    }
}

#[test]
fn steps_that_run_again_are_in_the_autocast_of_their_forward() {
    for slots in chains() {
        assert_exact(Oracle::Blockwise, setup, |how, model, leaves| {
            let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
            chain(how, slots.clone(), &leaves[0].1, &leaves[1].1, |i, inputs| advance(model, i, inputs))
        });
    }
}

type Normed = (nn::Linear, nn::BatchNorm);

fn normed(path: &nn::Path<'_>) -> Normed {
    (cell(path), nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default()))
}

/// Variables and their gradients after a chain whose steps update statistics and, where `read` says so, compute from them.
fn trained_with_statistics(slots: Option<usize>, read: fn(i64) -> bool) -> BTreeMap<String, [Vec<u8>; 2]> {
    let setup = Setup::new(normed);
    let (start, actions) = (randn(2, &[5, 6], Kind::Float), randn(3, &ACTIONS, Kind::Float));
    let (cell, norm) = &setup.model;
    let step = |i: i64, inputs: &[Tensor]| {
        let (state, loss) = advance(cell, i, inputs);
        (norm.forward_t(&state, !read(i)), loss)
    };
    let rollout = Rollout::new(&setup.vs);
    let options = Chain::new(BlockOptions::new("step").buffers(true), STEPS);
    if let Some(slots) = slots {
        let loss = chain(&How::Replay(&rollout), options.slots(slots), &start, &actions, step);
        rollout.backward(&loss).unwrap();
    } else {
        chain(&How::Plain, options, &start, &actions, step).backward();
    }
    let grad = |variable: &Tensor| if variable.requires_grad() { bytes(&variable.grad()) } else { Vec::new() };
    setup.vs.variables().into_iter().map(|(name, variable)| (name, [bytes(&variable), grad(&variable)])).collect()
}

#[test]
fn statistics_are_updated_once() {
    let expected = trained_with_statistics(None, |_| false);
    for slots in 1..=STEPS {
        assert!(trained_with_statistics(Some(slots), |_| false) == expected, "{slots} slots");
    }
}

/// Plain autograd would differentiate with the last statistics, which the kernel does not copy; so the oracle are blocks that
/// are all stored.
#[test]
fn a_step_that_runs_again_reads_the_statistics_of_its_forward() {
    let read = |i: i64| i % 3 == 2;
    let expected = trained_with_statistics(Some(STEPS), read);
    assert!(expected != trained_with_statistics(Some(STEPS), |_| false));
    for slots in 1..STEPS {
        assert!(trained_with_statistics(Some(slots), read) == expected, "{slots} slots");
    }
}

/// The least number of advances of all schedules, by trying them: see `schedule.rs`.
fn least_advances(len: usize, slots: usize) -> usize {
    let mut least = vec![vec![0; len + 1]; slots + 1];
    for s in 1..=slots {
        for l in 2..=len {
            let alone = l * (l - 1) / 2;
            let split = |m: usize| m + least[s - 1][l - m] + least[s][m];
            least[s][l] = if s == 1 { alone } else { (1..l).map(split).min().unwrap_or(alone) };
        }
    }
    least[slots][len]
}

/// How often the body of a chain of one number runs: in the forward, to advance, to be differentiated.
fn runs(steps: usize, slots: usize) -> [u64; 3] {
    let setup = Setup::new(|path| path.var("w", &[1], nn::Init::Const(0.9)));
    let (forward, again) = (Cell::new(0), Cell::new(0));
    let (w, counts) = (&setup.model, [&forward, &again]);
    let rollout = Rollout::new(&setup.vs);
    let chain = Chain::new("step", steps).slots(slots);
    let last = rollout.chain(chain, &[("x", &Tensor::from(1f32))], |_, _, x| {
        let count = counts[usize::from(is_replaying())];
        count.set(count.get() + 1);
        (&x[0] * w).tanh() + 0.1
    });
    let report = rollout.backward(&last.unwrap().sum(Kind::Float)).unwrap();
    let (_, step) = &report.blocks[0];
    assert_eq!((step.forwards, step.advances + step.replays), (forward.get(), again.get()));
    assert_eq!(report.total.advances, step.advances);
    [step.forwards, step.advances, step.replays]
}

/// The forward's runs, but for the last step's, are advances to the theory.
#[test]
fn no_schedule_advances_less_often() {
    let small = (1..=14).flat_map(|steps| (1..=steps + 1).map(move |slots| (steps, slots)));
    for (steps, slots) in small.chain([(40, 3), (64, 4), (60, 2), (30, 1), (100, 6)]) {
        let least = least_advances(steps, slots);
        let all = steps as u64;
        assert_eq!(runs(steps, slots), [all, (least + 1 - steps) as u64, all], "{steps} steps with {slots} slots");
    }
}

/// The theory's last step goes straight on with its graph: then the counts are its own, to the run.
#[test]
fn with_the_last_graph_kept_the_counts_are_those_of_the_theory() {
    for (steps, slots) in [(1, 1), (2, 1), (8, 1), (8, 2), (9, 3), (10, 4), (21, 3), (40, 3)] {
        let calls = Cell::new(0);
        let setup = Setup::new(|path| path.var("w", &[2], nn::Init::Const(0.75)));
        let w = &setup.model;
        let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Last(1)).build();
        let x = Tensor::from_slice(&[0.5f32, -0.25]).set_requires_grad(true);
        let last = rollout.chain(Chain::new("step", steps).slots(slots), &[("x", &x)], |_, _, i| {
            calls.set(calls.get() + 1);
            (&i[0] * w).tanh()
        });
        let report = rollout.backward(&last.unwrap().sum(Kind::Float)).unwrap();
        assert_eq!(calls.get(), least_advances(steps, slots) + steps, "{steps} steps with {slots} slots");
        assert_eq!((report.total.kept, report.total.replays), (1, steps as u64 - 1));
    }
}

/// Graphs that wait for their tensors hold no states.
#[test]
fn steps_whose_replays_end_early() {
    for slots in 1..=STEPS {
        let run = |early_stop: bool| {
            let setup = setup();
            let (start, actions) = (&setup.leaves[0].1, &setup.leaves[1].1);
            let rollout = Rollout::new(&setup.vs);
            let options = Chain::new(BlockOptions::new("step").early_stop(early_stop), STEPS).slots(slots);
            let model = &setup.model;
            let step = |i: i64, inputs: &[Tensor]| advance(model, i, inputs);
            let loss = chain(&How::Replay(&rollout), options, start, actions, step);
            let stopped = rollout.backward(&loss).unwrap().total.stopped;
            (stopped, bytes(&model.ws.grad()), bytes(&start.grad()), bytes(&actions.grad()))
        };
        let (all, expected) = (run(true), run(false));
        assert_eq!((all.0, expected.0), (STEPS as u64, 0), "{slots} slots");
        assert!((all.1, all.2, all.3) == (expected.1, expected.2, expected.3), "{slots} slots");
    }
}

#[test]
fn the_documented_numbers_of_advances() {
    assert_eq!(runs(1000, 16), [1000, 1861, 1000]);
    assert_eq!(runs(1000, 1000), [1000, 0, 1000]);
}

/// The states that the forward saves: those in slots, and those before the last step, which is replayed first.
#[test]
fn the_forward_saves_as_many_states_as_there_are_slots_and_one() {
    for (slots, saved) in [(1, 2), (3, 4), (STEPS - 1, STEPS), (STEPS, STEPS), (STEPS + 5, STEPS)] {
        let setup = setup();
        let rollout = Rollout::new(&setup.vs);
        let options = Chain::new("step", STEPS).slots(slots);
        let (start, actions) = (&setup.leaves[0].1, &setup.leaves[1].1);
        let loss = chain(&How::Replay(&rollout), options, start, actions, |i, inputs| advance(&setup.model, i, inputs));
        let report = rollout.backward(&loss).unwrap();
        let bytes = saved * (5 * 6 + 1) * 4 + STEPS * 5 * 2 * 4;
        assert_eq!(report.total.bytes_saved, bytes as u64, "{slots} slots");
    }
}

/// A step that lets no gradient through, as in truncated backpropagation, and steps before anything needs a gradient: what
/// is differentiated begins behind them, and has all slots.
#[test]
fn a_chain_begins_anew_behind_a_step_that_lets_no_gradient_through() {
    for slots in [1, 2, 4] {
        let setup = setup();
        let (start, actions) = (setup.leaves[0].1.detach(), &setup.leaves[1].1);
        let body = |i: i64, inputs: &[Tensor]| {
            let (state, loss) = advance(&setup.model, i, inputs);
            if i == 3 { (state.detach(), loss.detach()) } else { (state, loss) }
        };
        chain(&How::Plain, Chain::new("step", STEPS), &start, actions, body).backward();
        let expected: Vec<_> = setup.grads().into_values().map(|grad| grad.map(|grad| grad.copy())).collect();
        for (_, mut variable) in setup.trained() {
            variable.zero_grad();
        }
        let rollout = Rollout::new(&setup.vs);
        let options = Chain::new("step", STEPS).slots(slots);
        let loss = chain(&How::Replay(&rollout), options, &start, actions, body);
        let report = rollout.backward(&loss).unwrap();
        let rest = STEPS - 4;
        let advances = least_advances(rest, slots) + 1 - rest;
        assert_eq!([report.total.advances, report.total.replays], [advances as u64, rest as u64]);
        for ((name, found), expected) in setup.grads().into_iter().zip(expected) {
            let (Some(found), Some(expected)) = (&found, &expected) else {
                assert!(name == "start" && expected.is_none(), "{name}");
                continue;
            };
            assert!(same_bits(found, expected), "{name}");
        }
    }
}

/// Two chains beside each other, and one that goes on from both.
#[test]
fn chains_of_one_rollout_do_not_meet() {
    assert_exact(Oracle::Plain, setup, |how, model, leaves| {
        let run = |slots: usize, start: &Tensor| {
            let body = |i: i64, inputs: &[Tensor]| {
                let (state, _) = advance(model, i, inputs);
                let loss = &inputs[1] + state.sum(Kind::Float);
                (state, loss)
            };
            chain(how, Chain::new("step", STEPS).slots(slots), start, &leaves[1].1.detach(), body)
        };
        let (a, b) = (run(2, &leaves[0].1), run(3, &(&leaves[1].1.get(0) * 0.5).repeat([1, 3])));
        let both = (a * b).tanh() * Tensor::ones([5, 6], (Kind::Float, Device::Cpu));
        run(1, &both)
    });
}

/// A chain of steps that run a block.
fn nested<'m>(
    rollout: &Rollout<'m>,
    model: &'m nn::Linear,
    slots: usize,
    inputs: &[Tensor],
) -> Result<Pair, ReplayError> {
    let chain = Chain::new("step", STEPS).slots(slots).constant("actions", &inputs[1]);
    rollout.chain(chain, &[("state", &inputs[0]), ("loss", &Tensor::from(0f32))], move |rollout, i, inputs| {
        let given = [("state", &inputs[0]), ("loss", &inputs[1]), ("actions", &inputs[2])];
        rollout.block("inner", &given, move |_, inputs| advance(model, i, inputs))
    })
}

/// The chain of an inner block runs in its outer one's forward without being recorded, and in its replay as anywhere; a
/// step that runs blocks runs them each time.
#[test]
fn chains_nest_with_blocks() {
    for (slots, outer) in [1, 2, 5, STEPS].into_iter().flat_map(|slots| [(slots, false), (slots, true)]) {
        assert_exact(Oracle::Plain, setup, |how, model, leaves| {
            let (start, actions) = (&leaves[0].1, &leaves[1].1);
            match how {
                How::Replay(rollout) if outer => {
                    let inputs = [("start", start), ("actions", actions)];
                    rollout
                        .block("outer", &inputs, move |rollout, inputs| nested(rollout, model, slots, inputs))
                        .unwrap()
                        .1
                }
                How::Replay(rollout) => {
                    nested(rollout, model, slots, &[start.shallow_clone(), actions.shallow_clone()]).unwrap().1
                }
                _ => chain(how, Chain::new("step", STEPS), start, actions, |i, inputs| advance(model, i, inputs)),
            }
        });
    }
}

#[test]
fn without_gradients_a_chain_is_a_loop() {
    let setup = setup();
    let (start, actions) = (&setup.leaves[0].1, &setup.leaves[1].1);
    let body = |i: i64, inputs: &[Tensor]| advance(&setup.model, i, inputs);
    let plain = chain(&How::Plain, Chain::new("step", STEPS), start, actions, body);
    let inference = Rollout::inference();
    let under_no_grad = Rollout::new(&setup.vs);
    let found = [
        chain(&How::Replay(&inference), Chain::new("step", STEPS).slots(2), start, actions, body),
        tch::no_grad(|| chain(&How::Replay(&under_no_grad), Chain::new("step", STEPS).slots(2), start, actions, body)),
    ];
    assert!(found.iter().all(|loss| !loss.requires_grad() && same_bits(loss, &plain)));
}

/// Each step's replay follows on those of its successors, and all values that run again are compared bit by bit.
#[test]
fn steps_are_differentiated_from_the_last_to_the_first() {
    let setup = setup();
    let order = RefCell::new(Vec::new());
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let (start, actions) = (&setup.leaves[0].1, &setup.leaves[1].1);
    let loss = chain(&How::Replay(&rollout), Chain::new("step", 6).slots(2), start, actions, |i, inputs| {
        if is_replaying() {
            order.borrow_mut().push(i);
        }
        advance(&setup.model, i, inputs)
    });
    rollout.backward(&loss).unwrap();
    // Stored: the states before steps 0 and 3; before 4, from 3; those before 1 are stored on the way to 2.
    assert_eq!(order.take(), [5, 3, 4, 3, 0, 1, 2, 1, 0]);
}
