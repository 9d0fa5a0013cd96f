//! Guarantee *values*, for every shape of graph: siblings, diamonds, blocks in blocks, plain autograd around and
//! between them, and replays in another order than the reverse of the forwards.
//!
//! Plain autograd hands out contributions later-created uses first, and blocks are replayed in that order; with one use
//! of each weight per block it is the oracle, unless a test says otherwise.

use std::cell::RefCell;
use std::rc::Rc;

use replay_runtime::{ReplayError, Rollout};
use replay_tests::{How, Oracle, Outcome, Setup, assert_exact, assert_same, randn, same_bits};
use tch::nn::Module;
use tch::{Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn with_leaf() -> Setup<nn::Linear> {
    Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

fn step<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, h: &Tensor) -> Tensor {
    how.block("step", &[("h", h)], |i| model.forward(&i[0]).tanh())
}

fn join<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, a: &Tensor, b: &Tensor) -> Tensor {
    how.block("join", &[("a", a), ("b", b)], |i| model.forward(&(&i[0] * &i[1])).sin())
}

#[test]
fn a_diamond() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let h = step(how, model, &leaves[0].1);
        let (left, right) = (step(how, model, &h), step(how, model, &h.cos()));
        join(how, model, &left, &right).sum(Kind::Float)
    });
}

#[test]
fn an_output_that_four_later_blocks_read() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let h = step(how, model, &leaves[0].1);
        let ends: Vec<_> = (0..4).map(|_| step(how, model, &h)).collect();
        Tensor::stack(&ends, 0).square().sum(Kind::Float)
    });
}

/// Two losses over the same blocks, in one pass.
#[test]
fn two_losses_are_summed() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let h = step(how, model, &leaves[0].1);
        let (first, second) = (step(how, model, &h).exp().mean(Kind::Float), join(how, model, &h, &h.sin()));
        first * 3.0 + second.square().mean(Kind::Float)
    });
}

/// Of three outputs, one is used by a later block, one by the loss and one by nobody, in each of the six orders.
#[test]
fn some_outputs_are_used() {
    for (later, loss) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
            let (a, b, c) = how.block("three", &[("x", &leaves[0].1)], |i| {
                let h = model.forward(&i[0]);
                (h.tanh(), h.sin(), h.exp())
            });
            let outputs = [a, b, c];
            step(how, model, &outputs[later]).sum(Kind::Float) + outputs[loss].square().sum(Kind::Float)
        });
    }
}

/// Small whole numbers, of which every sum and product is exact, in whatever order they are taken.
fn whole(seed: i64, size: &[i64]) -> Tensor {
    randn(seed, size, Kind::Float).clamp(-2.0, 2.0).round()
}

/// The weight is used by plain operations too, before, between and after the blocks, several times each.
#[test]
fn plain_autograd_around_the_blocks_shares_the_weights() {
    let setup = || {
        Setup::new(|path| path.var_copy("w", &whole(3, &[2, 2]))).leaf("x", whole(2, &[3, 2]).set_requires_grad(true))
    };
    assert_exact(Oracle::Plain, setup, |how, w, leaves| {
        let plain = |h: &Tensor| h.matmul(w) + w.get(0);
        let step = |h: &Tensor| how.block("step", &[("h", h), ("w", w)], move |i| i[0].matmul(w) * 2.0 - i[1].get(1));
        let h = step(&plain(&leaves[0].1));
        let h = step(&(plain(&h) * &leaves[0].1));
        (plain(&h) * w.sum(Kind::Float)).sum(Kind::Float)
    });
}

/// A loss that no block is part of, and one in which a block's outputs are all unused.
#[test]
fn plain_autograd_alone() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let _ = step(how, model, &leaves[0].1);
        model.forward(&leaves[0].1).square().sum(Kind::Float)
    });
}

/// Applies `act` on a thread of its own, whose nodes are numbered from 0.
fn elsewhere(tensor: &Tensor, act: fn(&Tensor) -> Tensor) -> Tensor {
    let tensor = tensor.shallow_clone();
    std::thread::spawn(move || act(&tensor)).join().expect("the thread computes")
}

/// LibTorch takes the node with the highest number first, and numbers are per thread: what stands between the last
/// block and the loss waits until the first block is done.
#[test]
fn replays_in_another_order_than_the_reverse_of_the_forwards() {
    let logs = RefCell::new(Vec::new());
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let log = Rc::new(RefCell::new(Vec::new()));
        logs.borrow_mut().push(Rc::clone(&log));
        let noisy = |name: &'static str, h: &Tensor| {
            let log = Rc::clone(&log);
            how.block(name, &[("h", h)], move |i| {
                log.borrow_mut().push(name);
                model.forward(&i[0]).dropout(0.4, true)
            })
        };
        let (first, second, third) =
            (noisy("first", &leaves[0].1), noisy("second", &leaves[0].1), noisy("third", &leaves[0].1));
        elsewhere(&third, Tensor::sin).sum(Kind::Float)
            + first.sum(Kind::Float)
            + elsewhere(&second, Tensor::exp).sum(Kind::Float)
    });
    // The oracle's is the first.
    let log = logs.take()[1].take();
    assert_eq!(log[..4], ["first", "second", "third", "first"], "the order of the replays is the forwards' in part");
    assert_eq!(log.len(), 6);
}

/// What a body computes on a thread of its own is the block's as the rest is, however low the numbers of its nodes are.
#[test]
fn a_body_that_computes_on_another_thread() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let h = step(how, model, &leaves[0].1);
        how.block("apart", &[("h", &h)], |i| elsewhere(&i[0].exp(), Tensor::sin) * &i[0]).sum(Kind::Float)
    });
}

fn inner<'m>(rollout: &Rollout<'m>, model: &'m nn::Linear, h: &Tensor) -> Result<Tensor, ReplayError> {
    rollout.block("inner", &[("h", h)], move |_, i| model.forward(&i[0]).tanh())
}

/// Three siblings, one of them a block deeper than the others.
fn branches<'m>(rollout: &Rollout<'m>, model: &'m nn::Linear, x: &Tensor) -> Result<Tensor, ReplayError> {
    let (a, b) = (inner(rollout, model, x)?, inner(rollout, model, &x.sin())?);
    let c = rollout.block("middle", &[("h", &x.cos())], move |rollout, i| inner(rollout, model, &i[0]))?;
    Ok(a * b * c)
}

/// Inside a block, they give what they give side by side.
#[test]
fn branches_inside_a_block() {
    let run = |outer: bool| {
        let setup = with_leaf();
        let (model, x) = (&setup.model, &setup.leaves[0].1);
        let rollout = Rollout::new(&setup.vs);
        let y = if outer {
            rollout.block("outer", &[("x", x)], move |rollout, i| branches(rollout, model, &i[0]))
        } else {
            branches(&rollout, model, x)
        };
        let loss = y.unwrap().sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

/// Blocks that keep nothing stand among others: one under `no_grad`, one that detaches.
#[test]
fn blocks_without_gradient_among_others() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let h = step(how, model, &leaves[0].1);
        let constant = tch::no_grad(|| step(how, model, &h));
        let cut = how.block("cut", &[("h", &h)], |i| i[0].detach() + 1.0);
        assert!(!constant.requires_grad() && !cut.requires_grad());
        (step(how, model, &(h * constant)) * cut).sum(Kind::Float)
    });
}

/// The loss is a leaf, an input's leaf, or what a block returned, with nothing in between.
#[test]
fn a_loss_without_operations() {
    let setup = Setup::new(|path| path.var("w", &[1], nn::Init::Const(0.5)));
    let w = &setup.model;
    Rollout::new(&setup.vs).backward(w).unwrap();
    assert!(same_bits(&w.grad(), &w.ones_like()));

    let x = Tensor::from(3f32).set_requires_grad(true);
    let rollout = Rollout::new(&setup.vs);
    let same = rollout.block("same", &[("x", &x)], |_, i| i[0].shallow_clone()).unwrap();
    rollout.backward(&same).unwrap();
    assert!(same_bits(&x.grad(), &x.ones_like()) && same_bits(&w.grad(), &w.ones_like()));

    let rollout = Rollout::new(&setup.vs);
    let product = rollout.block("product", &[("x", &x)], |_, i| &i[0] * w).unwrap();
    rollout.backward(&product).unwrap();
    assert!(same_bits(&w.grad(), &w.full_like(4.0)) && same_bits(&x.grad(), &x.full_like(1.5)));
}

/// A force: the gradient of an energy with respect to an input of the block around, which the inner one captures. In
/// LibTorch the two gradients meet at the same leaf.
#[test]
fn an_inner_block_takes_a_gradient_with_respect_to_a_leaf_of_the_outer_one() {
    let randn = |seed| randn(seed, &[8], Kind::Double).set_requires_grad(true);
    let (mut x, mut w) = (randn(3), randn(4));
    let store = nn::VarStore::new(tch::Device::Cpu);
    let rollout = Rollout::new(&store);
    let y = rollout.block("outer", &[("x", &x), ("w", &w)], |rollout, i| {
        let x = i[0].shallow_clone();
        let force = move |_: &Rollout<'_>, i: &[Tensor]| {
            let energy = (x.square() * &i[0]).sum(Kind::Double);
            Tensor::run_backward(&[energy], &[&x], true, true).remove(0)
        };
        rollout.block("force", &[("h", &(i[0].sin() * &i[1]))], force)
    });
    rollout.backward(&y.unwrap().square().sum(Kind::Double)).unwrap();
    let (found_x, found_w) = (x.grad(), w.grad());
    x.zero_grad();
    w.zero_grad();
    (&x * 2.0 * (x.sin() * &w)).square().sum(Kind::Double).backward();
    for (found, expected) in [(found_x, x.grad()), (found_w, w.grad())] {
        assert!((&found - &expected).abs().max().double_value(&[]) < 1e-12, "{found} {expected}");
    }
}

/// A table that is an input of the outer block, looked up with a sparse gradient in one and read densely in the other.
#[test]
fn sparse_and_dense_gradients_meet_at_the_leaf_of_an_input() {
    let look_up =
        |table: &Tensor, h: &Tensor| Tensor::embedding(table, &Tensor::from_slice(&[0i64, 2, 2]), -1, false, true) * h;
    let read = |table: &Tensor, h: &Tensor| table.narrow(0, 0, 3) * h;
    for sparse_first in [true, false] {
        let run = |replay: bool| {
            let table = randn(3, &[4, 2], Kind::Float).set_requires_grad(true);
            let h = randn(4, &[3, 2], Kind::Float).set_requires_grad(true);
            let first = |table: &Tensor, h: &Tensor| if sparse_first { look_up(table, h) } else { read(table, h) };
            let second = move |t: &Tensor, h: &Tensor| if sparse_first { read(t, h) } else { look_up(t, h) };
            let store = nn::VarStore::new(tch::Device::Cpu);
            let rollout = Rollout::new(&store);
            if replay {
                let y = rollout.block("outer", &[("table", &table), ("h", &h)], |rollout, i| {
                    let (table, h) = (i[0].shallow_clone(), first(&i[0], &i[1]));
                    rollout.block("inner", &[("h", &h)], move |_, i| second(&table, &i[0]))
                });
                rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
            } else {
                second(&table, &first(&table, &h)).sum(Kind::Float).backward();
            }
            table.grad()
        };
        assert!(same_bits(&run(false), &run(true)), "sparse first: {sparse_first}");
    }
}
