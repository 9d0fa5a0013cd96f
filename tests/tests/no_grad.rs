//! Guarantee *no grad*: where nothing will be differentiated a block is a plain call. It keeps nothing, neither inputs
//! nor closure, and its outputs do not require grad.
//!
//! Inference mode, for which tch 0.26 has no guard, is in `replay-runtime/src/modes_tests.rs`.

use std::hint::black_box;
use std::rc::Rc;

use replay_runtime::{ReplayError, Rollout};
use replay_tests::{How, Oracle, Setup, assert_exact, randn, same_bits};
use tch::{Kind, Tensor, nn, nn::Module};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

/// Runs a block and demands that nothing of it is kept; returns its output.
fn assert_forgotten<'m>(rollout: &Rollout<'m>, model: &'m nn::Linear, x: &Tensor) -> Tensor {
    let witness = Rc::new(());
    let held = Rc::clone(&witness);
    let y = rollout
        .block("step", &[("x", x)], move |_, i| {
            black_box(&held);
            model.forward(&i[0]).tanh()
        })
        .unwrap();
    assert_eq!(Rc::strong_count(&witness), 1, "the closure is still kept");
    assert!(!y.requires_grad() && y.is_leaf());
    assert!(same_bits(&y, &tch::no_grad(|| model.forward(x).tanh())));
    y
}

#[test]
fn under_no_grad_nothing_is_kept() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let _guard = tch::no_grad_guard();
    let y = assert_forgotten(&rollout, &setup.model, &x());
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::LossWithoutGrad), "{error}");
}

/// Under `no_grad` an input that requires grad changes nothing, and reaches the body as it is.
#[test]
fn under_no_grad_the_body_gets_the_callers_tensors() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let x = x().set_requires_grad(true);
    let address = x.data_ptr();
    let y = tch::no_grad(|| {
        let seen = move |i: &[Tensor]| assert!(i[0].requires_grad() && i[0].data_ptr() == address);
        rollout.block("step", &[("x", &x)], move |_, i| {
            seen(i);
            i[0].tanh()
        })
    });
    assert!(!y.unwrap().requires_grad());
}

/// Nothing will be replayed, so the body may write what it likes.
#[test]
fn under_no_grad_a_block_may_write_its_input() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let x = x();
    let before = x.copy();
    let y = tch::no_grad(|| rollout.block("step", &[("x", &x)], |_, i| i[0].shallow_clone().g_add_scalar_(1.0)));
    assert!(y.is_ok() && same_bits(&x, &(before + 1.0)));
}

#[test]
fn where_nothing_is_trainable_nothing_is_kept() {
    let mut setup = Setup::new(linear);
    setup.vs.freeze();
    let rollout = Rollout::new(&setup.vs);
    let _ = assert_forgotten(&rollout, &setup.model, &x());
}

/// What is kept depends on the outputs, not on the inputs.
#[test]
fn a_body_that_detaches_keeps_nothing() {
    let setup = Setup::new(linear);
    let (model, x) = (&setup.model, x().set_requires_grad(true));
    let witness = Rc::new(());
    let held = Rc::clone(&witness);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("step", &[("x", &x)], move |_, i| {
            black_box(&held);
            model.forward(&i[0]).detach()
        })
        .unwrap();
    assert_eq!(Rc::strong_count(&witness), 1);
    assert!(!y.requires_grad());
}

#[test]
fn a_rollout_for_inference_keeps_nothing_in_grad_mode_either() {
    let setup = Setup::new(linear);
    let rollout = Rollout::inference();
    let y = assert_forgotten(&rollout, &setup.model, &x());
    let loss = (y * Tensor::from(1f32).set_requires_grad(true)).sum(Kind::Float);
    assert!(matches!(rollout.backward(&loss).unwrap_err(), ReplayError::Inference));
}

#[test]
fn blocks_inside_blocks_run_for_inference() {
    let setup = Setup::new(linear);
    let model = &setup.model;
    let rollout = Rollout::inference();
    let y = rollout.block("outer", &[("x", &x())], |rollout, i| assert_forgotten(rollout, model, &i[0]).sin()).unwrap();
    assert!(!y.requires_grad());
    assert!(same_bits(&y, &tch::no_grad(|| model.forward(&x()).tanh().sin())));
}

#[test]
fn grad_mode_comes_back_after_a_block_for_inference() {
    let setup = Setup::new(linear);
    let rollout = Rollout::inference();
    let failed: Result<Tensor, _> = rollout.block("fails", &[("x", &x())], |_, _| Err::<Tensor, _>("no"));
    assert!(matches!(failed, Err(ReplayError::Block { .. })));
    assert!(setup.model.forward(&x()).requires_grad());
}

/// A warm-up without gradients, then trained steps: each weight is used once per trained block, plain autograd's bits.
#[test]
fn a_warm_up_without_grad_is_not_differentiated() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how: &How<'_, '_>, model, _| {
            let step = |h: &Tensor| how.block("step", &[("h", h)], |i| model.forward(&i[0]).tanh());
            let h = tch::no_grad(|| step(&step(&x())));
            assert!(!h.requires_grad());
            step(&step(&h)).square().sum(Kind::Float)
        },
    );
}

/// A block inside a body's own `no_grad` stays plain in the replay too.
#[test]
fn a_nested_block_under_no_grad_is_plain_in_both_passes() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| match how {
            How::Replay(rollout) => {
                let step = move |rollout: &Rollout<'_>, i: &[Tensor]| {
                    let target = tch::no_grad(|| rollout.block("target", &[("x", &i[0])], |_, i| i[0].sin())).unwrap();
                    assert!(!target.requires_grad());
                    model.forward(&i[0]) * target
                };
                rollout.block("outer", &[("x", &x())], step).unwrap().sum(Kind::Float)
            }
            _ => (model.forward(&x()) * x().sin()).sum(Kind::Float),
        },
    );
}

/// What is no input is none without gradients either.
#[test]
fn under_no_grad_what_is_no_input_is_an_error() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let _guard = tch::no_grad_guard();
    let error = rollout.block("step", &[("x", &Tensor::new())], |_, i| i[0].shallow_clone()).unwrap_err();
    assert!(matches!(&error, ReplayError::UndefinedInput { input, .. } if input == "x"), "{error}");
    let error = rollout.block("step", &[], |_, _| x()).unwrap_err();
    assert!(matches!(error, ReplayError::NoInput { .. }), "{error}");
}
