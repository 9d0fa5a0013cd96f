//! Guarantee *forward*: a block runs in grad mode on detached leaves that carry the inputs' own `requires_grad`; its
//! outputs are detached, and its graph is dropped at once.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{Oracle, Setup, assert_exact, randn, same_bits};
use tch::nn::Module;
use tch::{Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

/// What a body saw: whether it is a replay, and of each input whether it is a leaf, whether it requires grad, and
/// where its values are.
type Seen = (bool, Vec<(bool, bool, usize)>);

fn look(inputs: &[Tensor]) -> Seen {
    let look = |input: &Tensor| (input.is_leaf(), input.requires_grad(), input.data_ptr().addr());
    (is_replaying(), inputs.iter().map(look).collect())
}

#[test]
fn a_body_sees_leaves_that_require_grad_as_the_inputs_do() {
    let setup = Setup::new(linear);
    let seen = RefCell::new(Vec::new());
    let leaf = randn(2, &[5, 6], Kind::Float).set_requires_grad(true);
    let computed = leaf.sin();
    let data = randn(3, &[5, 6], Kind::Float);
    let tokens = Tensor::from_slice(&[0i64, 1]);
    let inputs = [("leaf", &leaf), ("computed", &computed), ("data", &data), ("tokens", &tokens)];
    let expected: Vec<_> = inputs.iter().map(|(_, t)| (true, t.requires_grad(), t.data_ptr().addr())).collect();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("look", &inputs, |_, i| {
            seen.borrow_mut().push(look(i));
            setup.model.forward(&(&i[0] * &i[1] + &i[2])).index_select(0, &i[3])
        })
        .unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(*seen.borrow(), [(false, expected.clone()), (true, expected)]);
    assert!(computed.requires_grad() && !data.requires_grad());
}

#[test]
fn a_body_runs_in_grad_mode() {
    let setup = Setup::new(linear);
    let grad_mode = RefCell::new(Vec::new());
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("step", &[("x", &x)], |_, i| {
            let y = setup.model.forward(&i[0]);
            grad_mode.borrow_mut().push(y.requires_grad() && !y.is_leaf());
            y
        })
        .unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(*grad_mode.borrow(), [true, true]);
}

/// Attention with a mask takes another kernel where nothing is differentiated. Each weight is used once in the
/// one block: plain autograd is the oracle.
#[test]
fn a_forward_takes_the_kernels_of_training() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let x = randn(2, &[2, 3, 5, 6], Kind::Float);
            let mask = randn(3, &[5, 5], Kind::Float);
            how.block("attend", &[("x", &x), ("mask", &mask)], |i| {
                let q = model.forward(&i[0]);
                Tensor::scaled_dot_product_attention(&q, &i[0], &i[0], Some(&i[1]), 0.0, false, None::<f64>, false)
            })
            .square()
            .sum(Kind::Float)
        },
    );
}

#[test]
fn outputs_require_grad_as_those_of_the_body_did() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let x = randn(2, &[5, 6], Kind::Float);
    let (made, constant, index) = rollout
        .block("mixed", &[("x", &x)], |_, i| {
            let y = setup.model.forward(&i[0]);
            let index = y.argmax(1, false);
            (y, i[0].exp(), index)
        })
        .unwrap();
    assert!(made.requires_grad() && !made.is_leaf());
    assert!(!constant.requires_grad() && constant.is_leaf());
    assert!(!index.requires_grad() && index.kind() == Kind::Int64);
    rollout.backward(&(made * constant).sum(Kind::Float)).unwrap();
    assert!(setup.model.ws.grad().defined());
}

/// The gradient of an output does not come from a graph that the forward left behind, but from the node: nothing
/// that the body made is alive after it.
#[test]
fn the_graph_is_dropped_with_the_forward() {
    let probe = Setup::new(linear);
    let setup = Setup::new(linear);
    let alive: RefCell<Weak<()>> = RefCell::default();
    // A block of another rollout is a node in this one's graph; its closure is swept after the node died.
    let other = Rollout::new(&probe.vs);
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("outer", &[("x", &x)], |_, i| {
        let h = setup.model.forward(&i[0]);
        let token = Rc::new(());
        *alive.borrow_mut() = Rc::downgrade(&token);
        other.block("probe", &[("h", &h)], move |_, i| {
            let _ = &token;
            i[0].tanh()
        })
    });
    let y = y.unwrap();
    assert!(y.requires_grad());
    let _ = other.block("sweep", &[("x", &x)], |_, i| i[0].shallow_clone()).unwrap();
    assert!(alive.borrow().upgrade().is_none());
}

#[test]
fn a_body_runs_once_forward_and_once_per_replay() {
    let setup = Setup::new(linear);
    let runs = RefCell::new(Vec::new());
    let mut h = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    for step in 0..3 {
        let (model, runs) = (&setup.model, &runs);
        h = rollout
            .block("step", &[("h", &h)], move |_, i| {
                runs.borrow_mut().push((step, is_replaying()));
                model.forward(&i[0]).tanh()
            })
            .unwrap();
    }
    assert_eq!(*runs.borrow(), [(0, false), (1, false), (2, false)]);
    let report = rollout.backward(&h.sum(Kind::Float)).unwrap();
    assert_eq!(runs.borrow()[3..], [(2, true), (1, true), (0, true)]);
    assert_eq!((report.total.forwards, report.total.replays), (3, 3));
    assert!(!is_replaying());
}

#[test]
fn a_block_that_the_loss_does_not_need_is_not_replayed() {
    let setup = Setup::new(linear);
    let runs = Cell::new(0);
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("needed", &[("x", &x)], |_, i| setup.model.forward(&i[0])).unwrap();
    let idle = rollout.block("idle", &[("y", &y)], |_, i| {
        runs.set(runs.get() + 1);
        i[0].exp()
    });
    let idle = idle.unwrap();
    let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(runs.get(), 1);
    assert_eq!((report.total.forwards, report.total.replays), (2, 1));
    assert!(idle.requires_grad());
}

/// The next block cuts the graph, so that LibTorch comes by without a gradient.
#[test]
fn a_block_whose_gradient_never_arrives_is_not_replayed() {
    let setup = Setup::new(linear);
    let runs = Cell::new(0);
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let idle = rollout.block("idle", &[("x", &x)], |_, i| {
        runs.set(runs.get() + 1);
        setup.model.forward(&i[0])
    });
    let y = rollout.block("cuts", &[("h", &idle.unwrap())], |_, i| setup.model.forward(&i[0].detach())).unwrap();
    let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(runs.get(), 1);
    assert_eq!((report.total.forwards, report.total.replays), (2, 1));
}

#[test]
fn an_inner_block_runs_forward_replayed_and_again_for_its_own_gradient() {
    let setup = Setup::new(linear);
    let (outer, inner) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let (model, outer_runs, inner_runs) = (&setup.model, &outer, &inner);
    let y = rollout
        .block("outer", &[("x", &x)], move |rollout, i| {
            outer_runs.borrow_mut().push(is_replaying());
            let y = rollout.block("inner", &[("x", &i[0])], move |_, i| {
                inner_runs.borrow_mut().push((is_replaying(), i[0].is_leaf()));
                model.forward(&i[0]).tanh()
            })?;
            assert!(y.requires_grad());
            Ok::<_, ReplayError>(y)
        })
        .unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(*outer.borrow(), [false, true]);
    assert_eq!(*inner.borrow(), [(false, true), (true, true), (true, true)]);
}

/// The outer block's graph is about to be dropped, so an inner block leaves neither a closure nor a graph in it.
#[test]
fn an_inner_block_keeps_nothing_in_the_forward_of_the_outer_one() {
    let setup = Setup::new(linear);
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let model = &setup.model;
    let y = rollout.block("outer", &[("x", &x)], move |rollout, i| {
        let token = Rc::new(());
        let alive = Rc::downgrade(&token);
        let y = rollout.block("inner", &[("x", &i[0])], move |_, i| {
            let _ = &token;
            model.forward(&i[0]).tanh()
        });
        assert_eq!(alive.upgrade().is_some(), is_replaying());
        y
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
}

/// Nor in the forward of a block inside the outer one's replay.
#[test]
fn an_innermost_block_is_kept_in_the_replay_of_the_one_around_it_alone() {
    let setup = Setup::new(linear);
    let (model, kept) = (&setup.model, &RefCell::new(Vec::new()));
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("outer", &[("x", &randn(2, &[5, 6], Kind::Float))], move |rollout, i| {
        rollout.block("middle", &[("x", &i[0])], move |rollout, i| {
            let token = Rc::new(());
            let alive = Rc::downgrade(&token);
            let y = rollout.block("innermost", &[("x", &i[0])], move |_, i| {
                let _ = &token;
                model.forward(&i[0]).tanh()
            });
            kept.borrow_mut().push(alive.upgrade().is_some());
            y
        })
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(*kept.borrow(), [false, false, true]);
}

#[test]
fn the_inputs_are_left_as_they_were() {
    let setup = Setup::new(linear);
    let x = randn(2, &[5, 6], Kind::Float).set_requires_grad(true);
    let before = x.copy();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("step", &[("x", &x)], |_, i| {
            let mut own = i[0].copy();
            let _ = own.g_mul_scalar_(2.0);
            setup.model.forward(&own)
        })
        .unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert!(x.is_leaf() && x.requires_grad() && same_bits(&x, &before));
}
