//! Guarantee *accumulation*, for every order of forwards and backward passes: what arrives is added once, to what is
//! there, and nothing is left behind for the next step.
//!
//! Values are small whole numbers, of which every sum is exact, so that plain autograd is the oracle whatever the
//! order.

use replay_runtime::{ReplayError, Rollout};
use replay_tests::{How, Oracle, Setup, assert_exact, randn, replayed, same_bits};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

fn whole(seed: i64, size: &[i64]) -> Tensor {
    randn(seed, size, Kind::Float).clamp(-2.0, 2.0).round()
}

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var_copy("w", &whole(3, &[2, 2])))
}

fn with_old(setup: Setup<Tensor>) -> Setup<Tensor> {
    (&setup.model * 10.0).sum(Kind::Float).backward();
    setup
}

/// `blocks` steps from a start of their own.
fn chain<'m>(how: &How<'_, 'm>, w: &'m Tensor, seed: i64, blocks: usize) -> Tensor {
    let mut h = whole(seed, &[3, 2]);
    for _ in 0..blocks {
        h = how.block("step", &[("h", &h)], move |i| i[0].matmul(w) - 1.0);
    }
    h.sum(Kind::Float)
}

fn assert_equal_grads(expected: &Setup<Tensor>, found: &Setup<Tensor>) {
    let grad = |setup: &Setup<Tensor>| Some(setup.model.grad()).filter(Tensor::defined);
    match (grad(expected), grad(found)) {
        (Some(a), Some(b)) => assert!(same_bits(&a, &b), "{a}\n{b}"),
        (a, b) => panic!("expected {:?}, found {:?}", a.is_some(), b.is_some()),
    }
}

/// The weight is an input and a variable of the block, and is used outside: its gradient is added once for each use,
/// and the old one once.
#[test]
fn a_weight_passed_as_an_input_too() {
    fn program<'m>(how: &How<'_, 'm>, w: &'m Tensor, _: &[(String, Tensor)]) -> Tensor {
        let x = whole(2, &[3, 2]);
        let y = how.block("both", &[("x", &x), ("w", w)], move |i| i[0].matmul(w).matmul(&i[1]));
        (how.block("again", &[("w", w), ("y", &y)], move |i| i[1].matmul(&i[0]) + w.get(0)) * w.sum(Kind::Float))
            .sum(Kind::Float)
    }
    for old in [false, true] {
        let (plain, found) = if old { (with_old(setup()), with_old(setup())) } else { (setup(), setup()) };
        program(&How::Plain, &plain.model, &[]).backward();
        let handle = found.model.grad();
        replayed(&found, program);
        assert_equal_grads(&plain, &found);
        assert!(found.model.is_leaf());
        assert!(!old || handle.data_ptr() == found.model.grad().data_ptr());
    }
}

/// A leaf that no store knows, as input and captured, with an old gradient.
#[test]
fn a_leaf_of_no_store_passed_as_an_input_and_captured() {
    let run = |replay: bool| {
        let leaf = whole(5, &[2, 2]).set_requires_grad(true);
        (&leaf * 10.0).sum(Kind::Float).backward();
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        let held = leaf.shallow_clone();
        let body = move |i: &[Tensor]| i[0].matmul(&held);
        let y = if replay {
            rollout.block("both", &[("leaf", &leaf)], move |_, i| body(i)).unwrap()
        } else {
            body(&[leaf.shallow_clone()])
        };
        let loss = (y * &leaf).sum(Kind::Float);
        if replay {
            drop(rollout.backward(&loss).unwrap());
        } else {
            loss.backward();
        }
        leaf.grad()
    };
    assert!(same_bits(&run(false), &run(true)));
}

/// The graph around the block gives two weights one tensor's storage as their first gradient, before the block adds to one
/// of them.
#[test]
fn a_block_adds_to_what_the_graph_around_it_left() {
    let build = |path: &nn::Path<'_>| (path.ones("a", &[6]), path.ones("b", &[6]));
    let setup = || Setup::new(build).leaf("x", whole(2, &[1, 6]).set_requires_grad(true));
    assert_exact(Oracle::Plain, setup, |how, (a, b), leaves| {
        let h = how.block("step", &[("x", &leaves[0].1)], move |i| &i[0] * a.view([1, 6]));
        let around = a.view([1, 6]) + b.view([1, 6]);
        ((h + around) * 3.0).sum(Kind::Float)
    });
}

/// Several small batches before a step of the optimizer, of one to four blocks each.
#[test]
fn small_batches_add_up() {
    for blocks in 1..5 {
        let (plain, found) = (setup(), setup());
        for batch in 0..3 {
            chain(&How::Plain, &plain.model, batch, blocks).backward();
            replayed(&found, |how, w, _| chain(how, w, batch, blocks));
        }
        assert_equal_grads(&plain, &found);
    }
}

/// Used inside two blocks and outside of them.
#[test]
fn a_weight_inside_and_outside_of_blocks() {
    let (plain, found) = (with_old(setup()), with_old(setup()));
    let program = |how: &How<'_, '_>, w: &Tensor, inner: Tensor| {
        let h = whole(2, &[3, 2]).matmul(w);
        let again = inner.shallow_clone();
        let h = how.block("first", &[("h", &h)], move |i| i[0].matmul(&inner));
        let h = how.block("second", &[("h", &h)], move |i| i[0].matmul(&again) - 1.0);
        (h * w.sum(Kind::Float)).sum(Kind::Float)
    };
    program(&How::Plain, &plain.model, plain.model.shallow_clone()).backward();
    replayed(&found, |how, w, _| program(how, w, w.shallow_clone()));
    assert_equal_grads(&plain, &found);
}

/// `F` runs a forward, `B` the backward pass of the oldest one that is open.
fn interleaved(order: &str, setup: &Setup<Tensor>, replay: bool) {
    let mut open = std::collections::VecDeque::new();
    for (seed, act) in (0..).zip(order.chars()) {
        if act == 'F' {
            let rollout = Rollout::new(&setup.vs);
            let how = if replay { How::Replay(&rollout) } else { How::Plain };
            let loss = chain(&how, &setup.model, seed, 2);
            open.push_back((rollout, loss));
        } else {
            let (rollout, loss) = open.pop_front().expect("a forward");
            if replay {
                drop(rollout.backward(&loss).unwrap());
            } else {
                loss.backward();
            }
        }
    }
}

/// One model, forwards and backward passes in many orders, some forwards never followed by one.
#[test]
fn forwards_and_backward_passes_interleave() {
    for order in ["FB", "FFB", "FFBB", "FBFB", "FFFBBB", "FFBFBB", "FBFFB"] {
        let (plain, found) = (with_old(setup()), with_old(setup()));
        interleaved(order, &plain, false);
        interleaved(order, &found, true);
        assert_equal_grads(&plain, &found);
    }
}

/// The model twice on one start, in one product; and the forward of a block called twice where one output is used.
#[test]
fn a_model_times_itself() {
    fn program<'m>(how: &How<'_, 'm>, w: &'m Tensor, _: &[(String, Tensor)]) -> Tensor {
        let x = whole(2, &[3, 2]);
        let step = |x: &Tensor| how.block("step", &[("x", x)], move |i| i[0].matmul(w));
        let (a, b, _) = (step(&x), step(&x), step(&x));
        (a * b).sum(Kind::Float)
    }
    let (plain, found) = (setup(), setup());
    program(&How::Plain, &plain.model, &[]).backward();
    replayed(&found, program);
    assert_equal_grads(&plain, &found);
}

/// An old gradient of another kind keeps its own, as in plain autograd.
#[test]
fn an_old_gradient_of_another_kind() {
    let run = |replay: bool, old: Kind, new: Kind| {
        let setup = with_old(Setup::new(|path| path.var_copy("w", &whole(3, &[2, 2]))));
        let mut w = setup.model.shallow_clone();
        w.zero_grad();
        w.set_data(&w.detach().to_kind(old));
        (&w * 10.0).sum(old).backward();
        w.set_data(&w.detach().to_kind(new));
        let rollout = Rollout::new(&setup.vs);
        let x = whole(2, &[3, 2]).to_kind(new);
        let held = w.shallow_clone();
        let y = if replay {
            rollout.block("step", &[("x", &x)], move |_, i| i[0].matmul(&held)).unwrap()
        } else {
            x.matmul(&held)
        };
        let loss = y.sum(new);
        let outcome = if replay {
            rollout.backward(&loss).map(drop).map_err(|e| e.to_string())
        } else {
            loss.f_backward().map_err(|e| e.to_string())
        };
        outcome.map(|()| (w.grad().kind(), w.grad().to_kind(Kind::Double)))
    };
    for (old, new) in [(Kind::Float, Kind::BFloat16), (Kind::BFloat16, Kind::Float), (Kind::Double, Kind::Float)] {
        let (plain, found) = (run(false, old, new), run(true, old, new));
        match (plain, found) {
            (Ok(plain), Ok(found)) => {
                assert!(plain.0 == found.0 && same_bits(&plain.1, &found.1), "{plain:?} {found:?}");
            }
            (plain, found) => panic!("{plain:?} {found:?}"),
        }
    }
}

/// A body that differentiates a rollout of its own over the same store adds to the same gradients each time that it
/// runs; the outer pass adds its own, and where it fails all are as before.
#[test]
fn a_rollout_over_the_same_store_inside_a_body() {
    for fail in [false, true] {
        let setup = with_old(setup());
        let (vs, w, x) = (&setup.vs, &setup.model, whole(2, &[3, 2]));
        let old = w.grad().copy();
        let inner = |x: &Tensor| {
            let own = Rollout::new(vs);
            let y = own.block("inner", &[("x", x)], |_, i| i[0].matmul(w) * 3.0).unwrap();
            own.backward(&y.sum(Kind::Float)).unwrap();
        };
        let rollout = Rollout::new(vs);
        let outer = rollout.block("outer", &[("x", &x)], |_, i| {
            inner(&i[0]);
            if fail && replay_runtime::is_replaying() { Err("no") } else { Ok(i[0].matmul(w)) }
        });
        // The gradient of a product's sum: the column sums of the input, in each column.
        let once = x.sum_dim_intlist(0i64, false, Kind::Float).unsqueeze(1).expand([2, 2], false);
        assert!(w.grad().equal(&(&old + &once * 3.0)), "after the forward");
        assert_eq!(rollout.backward(&outer.unwrap().sum(Kind::Float)).is_err(), fail);
        let expected = if fail { &old + &once * 3.0 } else { &old + &once * 7.0 };
        assert!(w.grad().equal(&expected), "{}", w.grad());
    }
}

/// Two steps with an optimizer, the loss no scalar the first time; then another thread's rollout of the same variables,
/// which would be refused if a claim on them were left.
#[test]
fn nothing_is_left_for_the_next_step() {
    let setup = setup();
    let mut optimizer = nn::Sgd::default().build(&setup.vs, 1.0).unwrap();
    let rollout = Rollout::new(&setup.vs);
    let h = rollout.block("step", &[("x", &whole(2, &[3, 2]))], |_, i| i[0].matmul(&setup.model)).unwrap();
    assert!(matches!(rollout.backward(&h), Err(ReplayError::LossNotScalar { .. })));
    assert!(!setup.model.grad().defined());
    for step in 0..2 {
        optimizer.zero_grad();
        replayed(&setup, |how, w, _| chain(how, w, step, 3));
        optimizer.step();
        let rollout = Rollout::new(&setup.vs);
        let failing = |_: &Rollout<'_>, i: &[Tensor]| {
            if replay_runtime::is_replaying() { Err("no") } else { Ok(i[0].matmul(&setup.model)) }
        };
        let h = rollout.block("fails", &[("x", &whole(2, &[3, 2]))], failing).unwrap();
        let before = setup.model.grad().copy();
        rollout.backward(&h.sum(Kind::Float)).unwrap_err();
        assert!(same_bits(&before, &setup.model.grad()));
    }
    optimizer.zero_grad();
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            let w = setup.vs.variables().remove("w").unwrap();
            let rollout = Rollout::new(&setup.vs);
            let h = rollout.block("there", &[("x", &whole(2, &[3, 2]))], |_, i| i[0].matmul(&w)).unwrap();
            rollout.backward(&h.sum(Kind::Float)).map(drop)
        });
        there.join().unwrap().unwrap();
    });
    // Of the sum of a product, the gradient is the column sums of the input.
    let sums = whole(2, &[3, 2]).sum_dim_intlist(0i64, false, Kind::Float);
    assert!(setup.model.grad().select(1, 0).equal(&sums) && setup.model.grad().select(1, 1).equal(&sums));
}

/// Stands for a store that keeps a part of each gradient elsewhere and frees `.grad`, as sharded ones do: it may look at a
/// gradient once in each pass, when all blocks have added to it, and replaces what is there.
#[derive(Default)]
struct Sharder {
    kept: Vec<Tensor>,
    ready: usize,
}

impl Sharder {
    fn take(&mut self, w: &Tensor) {
        self.ready += 1;
        self.kept.push(w.grad().copy());
        let _ = w.grad().zero_();
    }
}

#[test]
fn a_sharder_that_replaces_gradients_gets_the_sum_of_all_blocks_once() {
    let run = |replay: bool| {
        let (setup, mut sharder) = (setup(), Sharder::default());
        for pass in 1..=2 {
            let rollout = Rollout::new(&setup.vs);
            let how = if replay { How::Replay(&rollout) } else { How::Plain };
            let loss = chain(&how, &setup.model, pass, 3);
            if replay {
                rollout.backward(&loss).unwrap();
            } else {
                loss.backward();
            }
            sharder.take(&setup.model);
        }
        assert_eq!(sharder.ready, 2);
        sharder.kept
    };
    let (expected, found) = (run(false), run(true));
    assert!(expected.iter().zip(&found).all(|(a, b)| same_bits(a, b)), "{expected:?} {found:?}");
    assert!(!same_bits(&expected[0], &expected[1]), "each pass has a gradient of its own");
}
