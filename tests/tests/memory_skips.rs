//! Guarantee *memory*, for what a backward pass does not need: blocks outside of a truncated window are neither replayed nor
//! kept, and where nothing trains nothing is differentiated.

use std::cell::RefCell;
use std::hint::black_box;
use std::rc::Rc;

use replay_runtime::{Rollout, is_replaying};
use replay_tests::{Setup, randn, same_bits};
use tch::{Kind, Tensor, nn};

const BLOCKS: usize = 8;
const WINDOW: usize = 3;

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[4], nn::Init::Const(0.9)))
}

/// The gradient reaches the last blocks of a long rollout, since what they start from was detached. The others are gone
/// by then, with what they captured.
#[test]
fn blocks_outside_of_a_truncated_window_are_not_replayed() {
    let x = randn(1, &[4], Kind::Float);
    let cut = |step: usize, state: Tensor| if step == BLOCKS - WINDOW { state.detach() } else { state };

    let plain = setup();
    let mut state = x.shallow_clone();
    for step in 0..BLOCKS {
        state = (cut(step, state) * &plain.model).tanh();
    }
    state.sum(Kind::Float).backward();

    let setup = setup();
    let (w, replayed, witness) = (&setup.model, RefCell::new(Vec::new()), Rc::new(()));
    let replayed = &replayed;
    let rollout = Rollout::new(&setup.vs);
    let mut state = x.shallow_clone();
    for step in 0..BLOCKS {
        let (held, input) = (Rc::clone(&witness), cut(step, state));
        let body = move |_: &Rollout<'_>, i: &[Tensor]| {
            black_box(&held);
            if is_replaying() {
                replayed.borrow_mut().push(step);
            }
            (&i[0] * w).tanh()
        };
        state = rollout.block("step", &[("state", &input)], body).unwrap();
    }
    // The last call has swept those of the blocks that were cut off.
    assert_eq!(Rc::strong_count(&witness) - 1, WINDOW);
    let report = rollout.backward(&state.sum(Kind::Float)).unwrap();
    assert_eq!((report.total.forwards, report.total.replays), (BLOCKS as u64, WINDOW as u64));
    assert_eq!(replayed.take(), [7, 6, 5]);
    assert!(same_bits(&plain.model.grad(), &w.grad()));
}

/// The loss of each step is kept by the caller, and the gradient of the last ones alone is taken: the others keep their
/// blocks until they are dropped.
#[test]
fn losses_that_are_dropped_free_their_blocks() {
    let setup = setup();
    let (w, witness) = (&setup.model, Rc::new(()));
    let x = randn(1, &[4], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let run = |x: &Tensor| {
        let held = Rc::clone(&witness);
        let body = move |_: &Rollout<'_>, i: &[Tensor]| {
            black_box(&held);
            (&i[0] * w).square().sum(Kind::Float)
        };
        rollout.block("loss", &[("x", x)], body).unwrap()
    };
    let mut losses: Vec<_> = (0..BLOCKS).map(|_| run(&x)).collect();
    assert_eq!(Rc::strong_count(&witness) - 1, BLOCKS);
    let window = losses.split_off(BLOCKS - WINDOW);
    drop(losses);
    let another = run(&x);
    assert_eq!(Rc::strong_count(&witness) - 1, WINDOW + 1);
    let report = rollout.backward(&Tensor::stack(&window, 0).sum(Kind::Float)).unwrap();
    assert_eq!(report.total.replays, WINDOW as u64);
    drop(another);
}

/// Blocks of frozen weights before the first that trains: no graph, nothing kept, nothing replayed. After it they are
/// differentiated for their inputs' sake, and inside them what depends on frozen things alone is not.
#[test]
fn frozen_parts() {
    let build = |path: &nn::Path<'_>| (path.var("w", &[4], nn::Init::Const(0.9)), path.ones_no_train("frozen", &[4]));
    let setup = Setup::new(build);
    let ((w, frozen), runs) = (&setup.model, RefCell::new(Vec::new()));
    let (x, constant) = (randn(1, &[4], Kind::Float), randn(2, &[4], Kind::Float));
    let runs = &runs;
    let rollout = Rollout::new(&setup.vs);
    let trunk = |name: &'static str, x: &Tensor| {
        let body = move |_: &Rollout<'_>, i: &[Tensor]| {
            let aside = (&i[1] * frozen).exp();
            let y = &i[0] * &aside;
            runs.borrow_mut().push((name, i[0].requires_grad(), aside.requires_grad(), y.requires_grad()));
            y
        };
        rollout.block(name, &[("x", x), ("constant", &constant)], body).unwrap()
    };
    let h = trunk("before", &x);
    assert!(!h.requires_grad());
    let h = rollout.block("adapter", &[("h", &h)], move |_, i| &i[0] * w).unwrap();
    let h = trunk("after", &h);
    let report = rollout.backward(&h.sum(Kind::Float)).unwrap();
    let blocks = report.blocks.iter().map(|(name, block)| (name.as_str(), block.replays, block.bytes_saved));
    assert_eq!(blocks.collect::<Vec<_>>(), [("adapter", 1, 16), ("after", 1, 32), ("before", 0, 0)]);
    let after = ("after", true, false, true);
    assert_eq!(runs.take(), [("before", false, false, false), after, after]);
    assert!(!constant.grad().defined() && !frozen.grad().defined() && w.grad().defined());
}
