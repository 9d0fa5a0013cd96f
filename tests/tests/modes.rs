//! Guarantee *modes*: grad mode, autocast (device, type, on and off) and the other modes of a replay are those of its
//! forward, whatever the caller's are by then; and the caller's are put back.
//!
//! Under autocast plain autograd keeps one cast copy of a weight for all its uses and adds their gradients in the
//! small type, while a block casts for itself. The oracle there is blockwise autograd, which adds what the blocks
//! give in the weight's own type.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use replay_runtime::{AutocastGuard, ReplayError, Rollout};
use replay_tests::{How, Oracle, Outcome, Setup, assert_exact, assert_same, randn, same_bits};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn with_leaf() -> Setup<nn::Linear> {
    Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

fn bfloat16() -> AutocastGuard {
    AutocastGuard::new(Device::Cpu, Kind::BFloat16)
}

/// The kind that autocast makes of a product of floats now.
fn product_kind() -> Kind {
    let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    x.matmul(&x).kind()
}

fn steps<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, start: &Tensor) -> Tensor {
    let mut h = start.shallow_clone();
    for _ in 0..4 {
        h = how.block("step", &[("h", &h)], |i| model.forward(&i[0]).tanh());
    }
    h.to_kind(Kind::Float).square().sum(Kind::Float)
}

/// The scope ends before `backward`: the replay restores it.
#[test]
fn autocast_is_that_of_the_forward() {
    for kind in [Kind::BFloat16, Kind::Half] {
        assert_exact(Oracle::Blockwise, with_leaf, |how, model, leaves| {
            let _autocast = AutocastGuard::new(Device::Cpu, kind);
            let y = model.ws.detach().matmul(&model.ws.detach());
            assert_eq!(y.kind(), kind);
            steps(how, model, &leaves[0].1)
        });
    }
}

/// A weight used twice inside a block under autocast is cast once there.
#[test]
fn a_weight_used_twice_under_autocast_is_cast_once_in_the_replay_too() {
    assert_exact(Oracle::Blockwise, with_leaf, |how, model, leaves| {
        let _autocast = bfloat16();
        let y = how.block("twice", &[("x", &leaves[0].1)], |i| model.forward(&model.forward(&i[0]).tanh()).sigmoid());
        y.to_kind(Kind::Float).sum(Kind::Float)
    });
}

/// No autocast in the forward, so none in the replay, though `backward` is called under it. Differentiating is the
/// caller's, in plain autograd as in a rollout: both do it under autocast. Plain autograd is the oracle, since nothing
/// is cast in the forward and each weight is used once in each block.
#[test]
fn autocast_around_backward_does_not_reach_a_replay() {
    let plain = with_leaf();
    let loss = steps(&How::Plain, &plain.model, &plain.leaves[0].1);
    {
        let _autocast = bfloat16();
        loss.backward();
    }
    let expected = Outcome { loss: loss.detach(), grads: plain.grads() };

    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    let loss = steps(&How::Replay(&rollout), &setup.model, &setup.leaves[0].1);
    {
        let _autocast = bfloat16();
        rollout.backward(&loss).unwrap();
        assert_eq!(product_kind(), Kind::BFloat16, "the caller's autocast was changed");
    }
    assert_same(&expected, &Outcome { loss: loss.detach(), grads: setup.grads() });
}

/// `backward` inside the scope gives what it gives outside.
#[test]
fn backward_inside_and_outside_of_the_scope_agree() {
    let run = |inside: bool| {
        let setup = with_leaf();
        let rollout = Rollout::new(&setup.vs);
        let autocast = bfloat16();
        let loss = steps(&How::Replay(&rollout), &setup.model, &setup.leaves[0].1);
        let autocast = inside.then_some(autocast);
        rollout.backward(&loss).unwrap();
        drop(autocast);
        assert_eq!(product_kind(), Kind::Float);
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

#[test]
fn each_block_has_its_own_autocast() {
    let kinds = RefCell::new(Vec::new());
    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    let look = |_: &Rollout<'_>, i: &[Tensor]| {
        let y = setup.model.forward(&i[0]);
        kinds.borrow_mut().push(y.kind());
        y.to_kind(Kind::Float)
    };
    let mut h = setup.leaves[0].1.shallow_clone();
    for kind in [None, Some(Kind::BFloat16), Some(Kind::Half), None] {
        let _autocast = kind.map(|kind| AutocastGuard::new(Device::Cpu, kind));
        h = rollout.block("look", &[("h", &h)], look).unwrap();
    }
    let _autocast = bfloat16();
    {
        let _disabled = AutocastGuard::disabled(Device::Cpu);
        h = rollout.block("look", &[("h", &h)], look).unwrap();
    }
    h = rollout.block("look", &[("h", &h)], look).unwrap();
    rollout.backward(&h.sum(Kind::Float)).unwrap();
    let forward = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Float, Kind::Float, Kind::BFloat16];
    assert_eq!(kinds.borrow()[..6], forward);
    let replay: Vec<_> = forward.into_iter().rev().collect();
    assert_eq!(kinds.borrow()[6..], replay);
    assert_eq!(product_kind(), Kind::BFloat16);
}

/// Autocast inside a body is the body's own matter. Each block casts for itself in plain autograd too, since its
/// scope ends with it, so both oracles agree; the last block's weight is used once.
#[test]
fn autocast_inside_a_body() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let mut h = leaves[0].1.shallow_clone();
        for _ in 0..3 {
            h = how.block("mixed", &[("h", &h)], |i| {
                let y = {
                    let _autocast = bfloat16();
                    model.forward(&i[0])
                };
                y.to_kind(Kind::Float).tanh()
            });
        }
        h.sum(Kind::Float)
    });
    assert_eq!(product_kind(), Kind::Float);
}

#[test]
fn nested_blocks_each_have_their_autocast() {
    let run = |nested: bool| {
        let setup = with_leaf();
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let inner = move |i: &[Tensor]| model.forward(&i[0]).tanh();
        let y = rollout.block("outer", &[("x", &setup.leaves[0].1)], move |rollout, i| {
            let _autocast = bfloat16();
            let h = if nested { rollout.block("inner", &[("h", &i[0])], move |_, i| inner(i))? } else { inner(i) };
            assert_eq!(h.kind(), Kind::BFloat16);
            Ok::<_, ReplayError>(h.to_kind(Kind::Float))
        });
        let loss = y.unwrap().sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        assert_eq!(product_kind(), Kind::Float);
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

/// The loss requires grad whatever the mode is when it is differentiated.
#[test]
fn grad_mode_off_around_backward_changes_nothing() {
    let run = |off: bool| {
        let setup = with_leaf();
        let rollout = Rollout::new(&setup.vs);
        let loss = steps(&How::Replay(&rollout), &setup.model, &setup.leaves[0].1);
        let guard = off.then(tch::no_grad_guard);
        rollout.backward(&loss).unwrap();
        assert_eq!(setup.leaves[0].1.exp().requires_grad(), !off, "the caller's grad mode was changed");
        drop(guard);
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

/// A body that turns grad mode off for a part of its work, by tch's own means. The weight is used once in each block.
#[test]
fn grad_mode_inside_a_body() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let mut h = leaves[0].1.shallow_clone();
        for _ in 0..3 {
            h = how.block("scaled", &[("h", &h)], |i| {
                let scale = tch::no_grad(|| i[0].abs().max());
                model.forward(&(&i[0] / scale)).tanh()
            });
        }
        h.sum(Kind::Float)
    });
}

/// A body that leaves a mode behind does not leave it to its caller.
#[test]
fn modes_that_a_body_leaves_behind_end_with_it() {
    let setup = with_leaf();
    let x = &setup.leaves[0].1;
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("careless", &[("x", x)], |_, i| {
        let y = setup.model.forward(&i[0]).to_kind(Kind::Float);
        std::mem::forget(tch::no_grad_guard());
        y
    });
    assert!(x.exp().requires_grad());
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert!(x.exp().requires_grad());
}

#[test]
fn the_guard_nests_and_restores_on_unwind() {
    assert_eq!(product_kind(), Kind::Float);
    {
        let _outer = bfloat16();
        assert_eq!(product_kind(), Kind::BFloat16);
        {
            let _inner = AutocastGuard::new(Device::Cpu, Kind::Half);
            assert_eq!(product_kind(), Kind::Half);
            let _disabled = AutocastGuard::disabled(Device::Cpu);
            assert_eq!(product_kind(), Kind::Float);
        }
        assert_eq!(product_kind(), Kind::BFloat16);
        let unwound = catch_unwind(|| {
            let _inner = AutocastGuard::new(Device::Cpu, Kind::Half);
            panic!("on purpose");
        });
        unwound.unwrap_err();
        assert_eq!(product_kind(), Kind::BFloat16);
    }
    assert_eq!(product_kind(), Kind::Float);
    let _again = bfloat16();
    assert_eq!(product_kind(), Kind::BFloat16);
}

#[test]
fn the_guard_refuses_what_autocast_does_not_know() {
    for (device, kind) in [(Device::Cpu, Kind::Float), (Device::Cpu, Kind::Int64), (Device::Mps, Kind::Half)] {
        catch_unwind(AssertUnwindSafe(|| drop(AutocastGuard::new(device, kind)))).unwrap_err();
        assert_eq!(product_kind(), Kind::Float);
    }
}

/// A weight that the caller had cast before the block, in the same scope, is cast anew in it: its gradient reaches
/// the weight, and the caller's own use keeps its own.
#[test]
fn casts_of_the_caller_are_not_used_in_a_block() {
    assert_exact(Oracle::Blockwise, with_leaf, |how, model, leaves| {
        let _autocast = bfloat16();
        let before = leaves[0].1.matmul(&model.ws);
        let h = how.block("step", &[("x", &leaves[0].1)], |i| i[0].matmul(&model.ws).tanh());
        let after = leaves[0].1.matmul(&model.ws);
        (before + h + after).to_kind(Kind::Float).sum(Kind::Float)
    });
}

/// A replay outside of the scope of its forward leaves no cast weight behind, which a later scope would take for
/// the weight as it is by then.
#[test]
fn casts_of_a_replay_do_not_outlive_it() {
    let setup = with_leaf();
    let x = &setup.leaves[0].1;
    let rollout = Rollout::new(&setup.vs);
    let loss = {
        let _autocast = bfloat16();
        steps(&How::Replay(&rollout), &setup.model, x)
    };
    rollout.backward(&loss).unwrap();
    tch::no_grad(|| drop(setup.model.ws.shallow_clone().g_mul_scalar_(2.0)));
    let _autocast = bfloat16();
    let expected = x.matmul(&setup.model.ws.detach().copy());
    assert!(same_bits(&expected, &x.matmul(&setup.model.ws)));
}
