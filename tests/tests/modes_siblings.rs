//! Guarantee *modes*, where blocks share something: a weight that autocast has cast, and the threads that kernels use.
//!
//! Autocast keeps the cast of a weight for the whole scope, so that a second use of it makes none. The oracle is
//! blockwise autograd, in which each block casts for itself.

use std::cell::RefCell;
use std::thread;

use replay_runtime::{AutocastGuard, ReplayError, Rollout};
use replay_tests::{How, Oracle, Outcome, Setup, assert_exact, assert_same, randn};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

fn with_leaf() -> Setup<nn::Linear> {
    Setup::new(|path| nn::linear(path, 6, 6, nn::LinearConfig::default()))
        .leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

const KINDS: [Kind; 2] = [Kind::BFloat16, Kind::Half];

fn step<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, x: &Tensor) -> Tensor {
    how.block("step", &[("x", x)], |i| model.forward(&i[0]).tanh())
}

/// Two siblings in one scope; the second one uses what the first has cast, in plain autograd.
#[test]
fn siblings_that_share_a_weight_under_autocast() {
    for kind in KINDS {
        assert_exact(Oracle::Blockwise, with_leaf, |how, model, leaves| {
            let _autocast = AutocastGuard::new(Device::Cpu, kind);
            let (a, b) = (step(how, model, &leaves[0].1), step(how, model, &leaves[0].1.detach()));
            assert_eq!((a.kind(), b.kind()), (kind, kind));
            (a * b).to_kind(Kind::Float).sum(Kind::Float)
        });
    }
}

/// One sibling in the scope, one outside, and one in a scope inside it without autocast.
#[test]
fn siblings_of_which_some_are_cast() {
    for kind in KINDS {
        assert_exact(Oracle::Blockwise, with_leaf, |how, model, leaves| {
            let x = leaves[0].1.detach();
            let outside = step(how, model, &x);
            let _autocast = AutocastGuard::new(Device::Cpu, kind);
            let inside = step(how, model, &x);
            let again = {
                let _disabled = AutocastGuard::disabled(Device::Cpu);
                step(how, model, &x)
            };
            assert_eq!([&outside, &inside, &again].map(Tensor::kind), [Kind::Float, kind, Kind::Float]);
            (outside * inside.to_kind(Kind::Float) * again).sum(Kind::Float)
        });
    }
}

/// Two inner blocks that share the weight, in an outer block under autocast: as the same blocks side by side, whose
/// sums are taken in the weight's own type too.
#[test]
fn inner_siblings_that_share_a_weight_under_autocast() {
    fn pair<'m>(rollout: &Rollout<'m>, model: &'m nn::Linear, x: &Tensor) -> Result<Tensor, ReplayError> {
        let inner = |x: &Tensor| rollout.block("inner", &[("x", x)], move |_, i| model.forward(&i[0]).tanh());
        Ok(inner(x)? * inner(&x.sin())?)
    }
    let run = |nested: bool| {
        let setup = with_leaf();
        let (model, x) = (&setup.model, &setup.leaves[0].1);
        let rollout = Rollout::new(&setup.vs);
        let autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
        let y = if nested {
            rollout.block("outer", &[("x", x)], move |rollout, i| pair(rollout, model, &i[0])).unwrap()
        } else {
            pair(&rollout, model, x).unwrap()
        };
        drop(autocast);
        let loss = y.to_kind(Kind::Float).sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

/// Blocks in blocks, `depth` deep; the innermost one notes how many threads kernels use.
fn nest<'m>(rollout: &Rollout<'m>, w: &'m Tensor, seen: &'m RefCell<Vec<i32>>, x: &Tensor, depth: usize) -> Tensor {
    let body = move |rollout: &Rollout<'m>, i: &[Tensor]| {
        seen.borrow_mut().push(tch::get_num_threads());
        if depth == 0 { &i[0] * w } else { nest(rollout, w, seen, &i[0], depth - 1) }
    };
    rollout.block("nest", &[("x", x)], body).unwrap()
}

/// The library never sets the number of threads that kernels use, and where it calls the engine from a thread of its
/// own, for the sake of depth, bodies see the caller's number all the same.
#[test]
fn the_number_of_threads_is_left_alone() {
    for threads in [1, 2, 3] {
        for depth in [0, 45] {
            let found = thread::spawn(move || {
                tch::set_num_threads(threads);
                let vs = nn::VarStore::new(Device::Cpu);
                let w = vs.root().var("w", &[4], nn::Init::Const(0.5));
                let seen = RefCell::new(Vec::new());
                let rollout = Rollout::new(&vs);
                let y = nest(&rollout, &w, &seen, &Tensor::ones([4], (Kind::Float, Device::Cpu)), depth);
                let between = tch::get_num_threads();
                rollout.backward(&y.sum(Kind::Float)).unwrap();
                (between, tch::get_num_threads(), seen.take())
            });
            let (between, after, seen) = found.join().unwrap();
            assert_eq!((between, after), (threads, threads));
            assert!(seen.len() > depth && seen.iter().all(|found| *found == threads), "{seen:?}");
        }
    }
    tch::set_num_threads(1);
}
