//! Guarantees *modes* and *no grad*, for what tch has no way to set: default type, deterministic algorithms, the cache
//! of autocast, and inference mode.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor, nn};

use super::*;
use crate::ffi::InferenceGuard;
use crate::{BlockOptions, ReplayError, Rollout, is_replaying};

const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);

struct Model {
    vs: nn::VarStore,
    w: Tensor,
}

fn model() -> Model {
    tch::set_num_threads(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().var("w", &[4], nn::Init::Const(0.5));
    Model { vs, w }
}

fn x() -> Tensor {
    Tensor::from_slice(&[1f32, -2.0, 3.0, 0.5])
}

/// Each mode changed, one at a time, to a value that is not the default.
fn changed() -> Vec<Modes> {
    // LibTorch's number of its double type, c10/core/ScalarType.h.
    const DOUBLE: i8 = 7;
    let now = Modes::current().unwrap();
    assert!(!now.deterministic && now.deterministic_fill && now.autocast_cache && now.default_dtype != DOUBLE);
    vec![
        Modes { default_dtype: DOUBLE, ..now },
        Modes { deterministic: true, ..now },
        Modes { deterministic: true, deterministic_warn_only: true, ..now },
        Modes { deterministic_fill: false, ..now },
        Modes { autocast_cache: false, ..now },
        Modes { autocast_cpu: true, autocast_cache: false, ..now },
    ]
}

/// Runs a block under `forward`, and its replay by a caller who is under `backward`; fails in the replay where asked
/// to.
fn run(forward: &Modes, backward: &Modes, fail: bool) {
    let before = Modes::current().unwrap();
    let seen = RefCell::new(Vec::new());
    let model = model();
    let rollout = Rollout::new(&model.vs);
    forward.set().unwrap();
    let y = rollout.block("looks", &[("x", &x())], |_, i| {
        seen.borrow_mut().push(Modes::current().unwrap());
        if fail && is_replaying() { Err("no") } else { Ok(&i[0] * &model.w) }
    });
    let y = y.unwrap();
    assert_eq!(Modes::current().unwrap(), *forward, "after the forward");
    backward.set().unwrap();
    assert_eq!(rollout.backward(&y.sum(Kind::Float)).is_err(), fail);
    assert_eq!(Modes::current().unwrap(), *backward, "after the backward pass");
    before.set().unwrap();
    assert_eq!(seen.take(), [*forward, *forward]);
}

#[test]
fn every_mode_is_that_of_the_forward_and_the_callers_stays() {
    let default = Modes::current().unwrap();
    let all: Vec<_> = changed().into_iter().chain([default]).collect();
    for (forward, backward) in all.iter().flat_map(|forward| all.iter().map(move |backward| (forward, backward))) {
        for fail in [false, true] {
            run(forward, backward, fail);
        }
    }
    assert_eq!(Modes::current().unwrap(), default);
}

/// What a body sets and leaves behind ends with it, also when it panics.
#[test]
fn modes_that_a_body_sets_end_with_it() {
    let default = Modes::current().unwrap();
    for modes in changed() {
        for panics in [false, true] {
            let model = model();
            let rollout = Rollout::new(&model.vs);
            let made = catch_unwind(AssertUnwindSafe(|| {
                rollout.block("sets", &[("x", &x())], |_, i| {
                    modes.set().unwrap();
                    assert!(!panics, "on purpose");
                    &i[0] * &model.w
                })
            }));
            assert_eq!(Modes::current().unwrap(), default);
            if let Ok(y) = made {
                rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
                assert_eq!(Modes::current().unwrap(), default);
            }
        }
    }
}

/// tch's own `autocast` is a scope that an unwinding body leaves open, and its cast weights with it.
#[test]
fn scopes_of_autocast_that_a_body_leaves_open_end_with_it() {
    let (cpu, bfloat16) = (Device::Cpu, 15);
    let before = (Modes::current().unwrap(), ffi::autocast_nesting());
    for (early_stop, panics) in [(true, false), (false, false), (false, true)] {
        let model = model();
        let rollout = Rollout::new(&model.vs);
        let options = BlockOptions::new("casts").early_stop(early_stop);
        let made = catch_unwind(AssertUnwindSafe(|| {
            rollout.block_with(options, &[("x", &x())], |_, i| {
                (0..2).for_each(|_| ffi::autocast_enter(cpu, true, bfloat16).unwrap());
                let y = (&i[0] * &model.w).sin();
                assert!(!panics, "on purpose");
                ffi::autocast_leave(cpu, false, bfloat16).unwrap();
                if early_stop {
                    // Not so in the replay, which ends with the sine.
                    ffi::autocast_leave(cpu, false, bfloat16).unwrap();
                }
                y
            })
        }));
        assert_eq!((Modes::current().unwrap(), ffi::autocast_nesting()), before, "{early_stop} {panics}");
        assert_eq!(made.is_err(), panics);
        if let Ok(y) = made {
            let report = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
            assert_eq!(report.total.stopped > 0, early_stop);
            assert_eq!((Modes::current().unwrap(), ffi::autocast_nesting()), before, "{early_stop}");
        }
    }
}

/// A tensor made in a mode that the replay is not called in: the default type.
#[test]
fn a_tensor_of_the_default_type_has_the_same_type_in_the_replay() {
    let default = Modes::current().unwrap();
    let double = changed().remove(0);
    let kinds = RefCell::new(Vec::new());
    let model = model();
    let rollout = Rollout::new(&model.vs);
    double.set().unwrap();
    let y = rollout.block("makes", &[("x", &x())], |_, i| {
        // A sum of whole numbers divided by one has the default type.
        let mean = Tensor::from_slice(&[1i64, 2]).sum(Kind::Int64) / Tensor::from(2i64);
        kinds.borrow_mut().push(mean.kind());
        &i[0] * &model.w * mean
    });
    default.set().unwrap();
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(kinds.take(), [Kind::Double, Kind::Double]);
}

fn made_for_inference() -> Tensor {
    let _inference = InferenceGuard::enter();
    x()
}

#[test]
fn an_inference_tensor_is_an_error_in_the_forward_that_names_it() {
    let model = model();
    let rollout = Rollout::new(&model.vs);
    let constant = made_for_inference();
    assert!(constant.is_inference());
    for (first, second, named) in [(&constant, &x(), "first"), (&x(), &constant, "second")] {
        let inputs = [("first", first), ("second", second)];
        let error = rollout.block("reads", &inputs, |_, i| &i[0] * &i[1] * &model.w).unwrap_err();
        assert!(matches!(&error, ReplayError::InferenceInput { input, .. } if input == named), "{error}");
        assert!(error.to_string().contains(named) && error.to_string().lines().count() == 2, "{error}");
    }
    // A copy made outside is what the message advises.
    let y = rollout.block("reads", &[("copy", &constant.copy())], |_, i| &i[0] * &model.w).unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert!(model.w.grad().equal(&x()));
}

/// LibTorch itself refuses to save such a tensor for a gradient.
#[test]
fn an_inference_tensor_that_the_body_captures_is_an_error_in_the_forward() {
    let model = model();
    let constant = made_for_inference();
    let rollout = Rollout::new(&model.vs);
    let error = rollout.block("captures", &[("x", &x())], |_, i| (&i[0] * &model.w).f_mul(&constant)).unwrap_err();
    assert!(error.to_string().contains("Inference tensors"), "{error}");
}

#[test]
fn in_inference_mode_a_block_is_a_plain_call() {
    let model = model();
    let witness = std::rc::Rc::new(());
    let held = std::rc::Rc::clone(&witness);
    let rollout = Rollout::new(&model.vs);
    let y = {
        let _inference = InferenceGuard::enter();
        rollout.block("plain", &[("x", &made_for_inference())], move |_, i| {
            let _ = &held;
            &i[0] * &model.w
        })
    };
    let y = y.unwrap();
    assert!(y.is_inference() && !y.requires_grad());
    assert_eq!(std::rc::Rc::strong_count(&witness), 1, "nothing is kept");
}

/// Grad mode does not help there: LibTorch records nothing.
#[test]
fn in_inference_mode_a_block_is_a_plain_call_in_grad_mode_too() {
    let model = model();
    let rollout = Rollout::new(&model.vs);
    let _inference = InferenceGuard::enter();
    let x = x();
    let y = tch::with_grad(|| rollout.block("writes", &[("x", &x)], |_, i| i[0].shallow_clone().g_add_scalar_(1.0)));
    assert_eq!(y.unwrap().data_ptr(), x.data_ptr(), "the body had the caller's own tensor");
}

/// The caller's inference mode is no concern of the gradient, as it is none of plain autograd's.
#[test]
fn a_backward_pass_in_inference_mode_gives_the_same_gradient() {
    let gradient = |inside: bool, nested: bool| {
        let model = model();
        let rollout = Rollout::new(&model.vs);
        let w = &model.w;
        let y = rollout.block("outer", &[("x", &x())], move |rollout, i| {
            assert!(!ffi::inference_mode());
            if nested {
                rollout.block("inner", &[("x", &i[0])], move |_, i| (&i[0] * w).sin())
            } else {
                Ok((&i[0] * w).sin())
            }
        });
        let loss = y.unwrap().sum(Kind::Float);
        let inference = inside.then(InferenceGuard::enter);
        rollout.backward(&loss).unwrap();
        assert_eq!(ffi::inference_mode(), inside, "the caller's mode");
        drop(inference);
        let grad = model.w.grad();
        assert!(!grad.is_inference() && grad.kind() == OPTIONS.0);
        grad
    };
    for nested in [false, true] {
        assert!(gradient(true, nested).equal(&gradient(false, nested)));
    }
}

/// Old gradients take the new ones there too, and come back after a failure.
#[test]
fn old_gradients_and_inference_mode() {
    for fail in [false, true] {
        let model = model();
        (&model.w * 10.0).sum(Kind::Float).backward();
        let rollout = Rollout::new(&model.vs);
        let y = rollout.block("step", &[("x", &x())], |_, i| {
            if fail && is_replaying() { Err("no") } else { Ok(&i[0] * &model.w) }
        });
        let loss = y.unwrap().sum(Kind::Float);
        let inference = InferenceGuard::enter();
        assert_eq!(rollout.backward(&loss).is_err(), fail);
        drop(inference);
        let expected = if fail { x().full_like(10.0) } else { x() + 10.0 };
        assert!(model.w.grad().equal(&expected), "{}", model.w.grad());
    }
}
