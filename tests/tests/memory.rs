//! Guarantee *memory*: a rollout keeps each input once and nothing else, and gives it back as the backward pass goes
//! on, or when rollout or loss is dropped.
//!
//! Memory is measured from outside: what the process holds resident, with tensors so large that the allocator returns
//! each to the system at once. Closures are counted by what they capture.

use std::cell::RefCell;
use std::hint::black_box;
use std::rc::{Rc, Weak};

use replay_runtime::{Rollout, RolloutReport, is_replaying};
use replay_tests::{Setup, bytes, randn};
use tch::{Device, Kind, Tensor, nn};

/// Elements of a tensor of 64 MiB, and its size.
const LARGE: i64 = 16 << 20;
const LARGE_MIB: i64 = 64;

fn large() -> Tensor {
    Tensor::ones([LARGE], (Kind::Float, Device::Cpu))
}

/// Resident memory of this process in MiB.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
    let pages: i64 = statm.split_whitespace().nth(1).expect("the second field").parse().expect("a number");
    pages * 4 / 1024
}

/// Demands that about `tensors` large ones have come (or, negative, gone) since `before`.
fn assert_grown(before: i64, tensors: i64) {
    let grown = resident() - before;
    assert!((grown - tensors * LARGE_MIB).abs() < LARGE_MIB / 2, "grew by {grown} MiB, not by {tensors} tensors");
}

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[1], nn::Init::Const(2.0)))
}

/// A number from a large input and the model's weight.
fn reduce(rollout: &Rollout<'_>, model: &Tensor, x: &Tensor) -> Tensor {
    let w = model.shallow_clone();
    rollout.block("reduce", &[("x", x)], move |_, i| &i[0].mean(Kind::Float) * &w).unwrap()
}

#[test]
fn a_dropped_rollout_frees_its_inputs_while_the_loss_lives() {
    let setup = setup();
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let losses: Vec<_> = (0..3).map(|_| reduce(&rollout, &setup.model, &large())).collect();
    assert_grown(before, 3);
    drop(rollout);
    assert_grown(before, 0);
    assert!(losses.iter().all(Tensor::requires_grad));
}

#[test]
fn a_dropped_loss_frees_its_inputs_while_the_rollout_lives() {
    let setup = setup();
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let kept = reduce(&rollout, &setup.model, &large());
    let loss = reduce(&rollout, &setup.model, &large());
    assert_grown(before, 2);
    drop(loss);
    assert_grown(before, 1);
    rollout.backward(&kept).unwrap();
    assert_grown(before, 0);
}

/// Each replay sees one input less than the one before: its successor's is gone.
#[test]
fn backward_frees_inputs_as_it_passes_them() {
    let setup = setup();
    let seen = RefCell::new(Vec::new());
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let mut state = Tensor::from(1f32);
    for _ in 0..4 {
        let (seen, w) = (&seen, &setup.model);
        let inputs = [("x", &large()), ("state", &state)];
        state = rollout
            .block("step", &inputs, move |_, i| {
                seen.borrow_mut().push(resident() - before);
                i[0].mean(Kind::Float) * &i[1] * w
            })
            .unwrap();
    }
    rollout.backward(&state.sum(Kind::Float)).unwrap();
    assert_grown(before, 0);
    let replays = seen.take().split_off(4);
    assert!(replays[0] > 7 * LARGE_MIB / 2, "{replays:?}");
    assert!(replays.windows(2).all(|pair| pair[0] - pair[1] > LARGE_MIB / 2), "{replays:?}");
}

/// What a forward needs besides inputs and outputs is gone when it returns.
#[test]
fn the_graph_of_a_forward_is_dropped_at_once() {
    let setup = setup();
    let x = large();
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let w = &setup.model;
    let loss = rollout
        .block("wide", &[("x", &x)], move |_, i| {
            let out = (&i[0] * w).sin().exp().tanh().mean(Kind::Float);
            assert!(resident() - before > 5 * LARGE_MIB / 2, "the graph keeps its tensors");
            out
        })
        .unwrap();
    assert_grown(before, 0);
    rollout.backward(&loss).unwrap();
}

/// Rollouts that end in each way, one after the other.
#[test]
fn nothing_piles_up() {
    let setup = setup();
    let run = |ending: usize| {
        let rollout = Rollout::new(&setup.vs);
        let loss = reduce(&rollout, &setup.model, &large());
        match ending % 4 {
            0 => drop(rollout.backward(&loss).unwrap()),
            1 => drop((rollout, loss)),
            2 => drop((loss, rollout)),
            _ => {
                let _ = loss.f_backward().expect_err("it is not `Rollout::backward`");
            }
        }
    };
    (0..4).for_each(run);
    let before = resident();
    (0..16).for_each(run);
    assert_grown(before, 0);
}

/// Closures are freed where their inputs are, each once.
#[test]
fn closures_are_freed_with_their_blocks() {
    let setup = setup();
    let model = &setup.model;
    let witness = Rc::new(());
    let run = |rollout: &Rollout<'_>, x: &Tensor| {
        let (held, w) = (Rc::clone(&witness), model.shallow_clone());
        rollout
            .block("held", &[("x", x)], move |_, i| {
                black_box(&held);
                &i[0] * &w
            })
            .unwrap()
    };
    let alive = || Rc::strong_count(&witness) - 1;

    let rollout = Rollout::new(&setup.vs);
    let first = run(&rollout, &Tensor::from(1f32));
    let second = run(&rollout, &first);
    assert_eq!(alive(), 2);
    drop(second);
    // The rollout looks after its dead when it is used next.
    let second = run(&rollout, &first);
    assert_eq!(alive(), 2);
    rollout.backward(&second.sum(Kind::Float)).unwrap();
    assert_eq!(alive(), 0);

    let rollout = Rollout::new(&setup.vs);
    let loss = run(&rollout, &Tensor::from(1f32));
    drop(rollout);
    assert_eq!(alive(), 0);
    drop(loss);
}

/// A replayed block's closure does not wait for the end of the pass.
#[test]
fn backward_frees_closures_as_it_passes_them() {
    let setup = setup();
    let (model, witness) = (&setup.model, Rc::new(()));
    let seen = RefCell::new(Vec::new());
    let rollout = Rollout::new(&setup.vs);
    let mut state = Tensor::from(1f32);
    for _ in 0..3 {
        let (seen, watch, held) = (&seen, Rc::downgrade(&witness), Rc::clone(&witness));
        state = rollout
            .block("held", &[("state", &state)], move |_, i| {
                black_box(&held);
                seen.borrow_mut().push(watch.strong_count() - 1);
                &i[0] * model
            })
            .unwrap();
    }
    rollout.backward(&state.sum(Kind::Float)).unwrap();
    assert_eq!(seen.take(), [1, 2, 3, 3, 2, 1]);
}

/// The report of a rollout over the given inputs of one block after the other.
fn report(inputs: &[Tensor]) -> RolloutReport {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let losses: Vec<_> = inputs.iter().map(|x| reduce(&rollout, &setup.model, x)).collect();
    rollout.backward(&Tensor::stack(&losses, 0).sum(Kind::Float)).unwrap()
}

#[test]
fn an_input_of_a_hundred_blocks_is_kept_once() {
    let x = randn(1, &[1000], Kind::Float);
    let shared: Vec<_> = (0..100).map(|_| x.shallow_clone()).collect();
    let report = report(&shared);
    assert_eq!((report.total.forwards, report.total.replays), (100, 100));
    assert_eq!(report.total.bytes_saved, 4000);
}

#[test]
fn the_same_input_in_a_new_version_is_kept_on_the_same_storage() {
    let setup = setup();
    let mut x = randn(1, &[1000], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let first = reduce(&rollout, &setup.model, &x);
    let _ = x.g_add_scalar_(1.0);
    let second = reduce(&rollout, &setup.model, &x);
    drop(first);
    let report = rollout.backward(&second.sum(Kind::Float)).unwrap();
    assert_eq!(report.total.bytes_saved, 4000);
}

/// Other data comes without a new version.
#[test]
fn an_input_with_other_data_is_kept_anew() {
    let setup = setup();
    let mut x = Tensor::from_slice(&[1f32, 1.0]);
    let rollout = Rollout::new(&setup.vs);
    let first = reduce(&rollout, &setup.model, &x);
    x.set_data(&Tensor::from_slice(&[5f32, 5.0]));
    let second = reduce(&rollout, &setup.model, &x);
    drop(first);
    rollout.backward(&second.sum(Kind::Float)).unwrap();
    // The mean of the second input.
    assert_eq!(bytes(&setup.model.grad()), bytes(&Tensor::from_slice(&[5f32])));
}

#[test]
fn views_and_expanded_inputs_are_not_inflated() {
    let base = large();
    let before = resident();
    let views = [base.narrow(0, 10, 1000), base.narrow(0, 0, 1).expand([LARGE], false), base.view([4096, -1]).tr()];
    let report = report(&views);
    assert_grown(before, 0);
    assert_eq!(report.total.bytes_saved, 4 * LARGE.unsigned_abs());
}

/// A view is on its base's storage, so the base's values are read and not copied.
#[test]
fn a_large_input_is_shared_and_not_copied() {
    let setup = setup();
    let x = large();
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let loss = reduce(&rollout, &setup.model, &x) + reduce(&rollout, &setup.model, &x.view([4096, -1]));
    assert_grown(before, 0);
    rollout.backward(&loss).unwrap();
    assert_grown(before, 0);
}

/// The closure of a block inside another, of whose output nothing comes, does not wait for the end of the pass.
#[test]
fn an_inner_block_that_nobody_needs_is_freed_with_its_replay() {
    let setup = setup();
    let (model, held) = (&setup.model, RefCell::new(Weak::new()));
    let held = &held;
    let rollout = Rollout::new(&setup.vs);
    let h = rollout.block("looks", &[("x", &Tensor::from(1f32))], move |_, i| {
        assert_eq!(held.borrow().strong_count(), 0);
        &i[0] * model
    });
    let y = rollout.block("outer", &[("h", &h.unwrap())], move |rollout, i| {
        let token = Rc::new(());
        held.replace(Rc::downgrade(&token));
        let unneeded = rollout.block("unneeded", &[("h", &i[0])], move |_, i| {
            black_box(&token);
            i[0].exp()
        });
        assert_eq!(held.borrow().strong_count(), usize::from(is_replaying()));
        drop(unneeded.unwrap());
        &i[0] * model
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
}

/// Whether it requires grad is no matter of its values.
#[test]
fn an_input_that_requires_grad_later_is_kept_once() {
    let setup = setup();
    let x = randn(1, &[1000], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let first = reduce(&rollout, &setup.model, &x);
    let _ = x.set_requires_grad(true);
    let second = reduce(&rollout, &setup.model, &x);
    let report = rollout.backward(&(first + second)).unwrap();
    assert_eq!(report.total.bytes_saved, 4000);
    assert!(x.grad().defined());
}

/// What arrived at a block's output is gone with its replay, though the loss and so the graph live on.
#[test]
fn gradients_of_outputs_are_not_kept() {
    let setup = setup();
    let w = &setup.model;
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("wide", &[("x", &large())], |_, i| &i[0] * w).unwrap();
    let loss = y.square().mean(Kind::Float);
    drop(y);
    rollout.backward(&loss).unwrap();
    assert_grown(before, 0);
    assert!(loss.requires_grad());
}
