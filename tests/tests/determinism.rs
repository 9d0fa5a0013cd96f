//! Guarantee *determinism*: what a replay returns must match the forward's outputs in shape, kind and whether they
//! require grad, else `backward` is an error that names the output. (Their number is part of the body's type.)

use replay_runtime::{ReplayError, ReplayOutput, Rollout, is_replaying};
use replay_tests::{Setup, randn, same_bits};
use tch::nn::Module;
use tch::{Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

/// Runs one block whose replay goes another way, and returns what `backward` says.
fn diverge<R: ReplayOutput>(
    body: impl Fn(&nn::Linear, &Tensor, bool) -> R,
    loss: impl Fn(R::Value) -> Tensor,
) -> ReplayError {
    let setup = Setup::new(linear);
    let x = randn(2, &[5, 6], Kind::Float);
    let old = setup.model.ws.sin().sum(Kind::Float);
    old.backward();
    let before = setup.model.ws.grad().copy();
    let rollout = Rollout::new(&setup.vs);
    let made = rollout.block("fickle", &[("x", &x)], |_, i| body(&setup.model, &i[0], is_replaying())).unwrap();
    let after = rollout.block("steady", &[("y", &loss(made))], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
    let error = rollout.backward(&after.sum(Kind::Float)).unwrap_err();
    assert!(same_bits(&setup.model.ws.grad(), &before), "gradients were not restored");
    assert!(!setup.model.bs.as_ref().unwrap().grad().defined(), "gradients were not restored");
    error
}

#[track_caller]
fn assert_mismatch(error: &ReplayError, output: &str, expected: &str, found: &str) {
    let ReplayError::OutputMismatch { block, what, .. } = error else { panic!("{error:?}") };
    assert_eq!((block.as_str(), what.as_str()), ("fickle", output));
    let text = error.to_string();
    assert!(text.contains(expected) && text.contains(found), "{text}");
}

#[test]
fn another_shape_is_an_error() {
    let error = diverge(
        |model, x, again| {
            let y = model.forward(x);
            if again { y.narrow(0, 0, 4) } else { y }
        },
        |y| y,
    );
    assert_mismatch(&error, "output 0", "[5, 6]", "[4, 6]");
}

#[test]
fn the_same_number_of_values_in_another_shape_is_an_error() {
    let error = diverge(
        |model, x, again| {
            let y = model.forward(x);
            if again { y.reshape([6, 5]) } else { y }
        },
        |y| y,
    );
    assert_mismatch(&error, "output 0", "[5, 6]", "[6, 5]");
}

#[test]
fn another_kind_is_an_error() {
    let error = diverge(
        |model, x, again| {
            let y = model.forward(x);
            if again { y.to_kind(Kind::Double) } else { y }
        },
        |y| y,
    );
    assert_mismatch(&error, "output 0", "Float", "Double");
}

#[test]
fn an_output_that_no_longer_requires_grad_is_an_error() {
    let error = diverge(
        |model, x, again| {
            let y = model.forward(x);
            if again { y.detach() } else { y }
        },
        |y| y,
    );
    assert_mismatch(&error, "output 0", "with grad", "without grad");
}

#[test]
fn an_output_that_requires_grad_now_is_an_error() {
    let error = diverge(
        |model, x, again| {
            let y = model.forward(x);
            let z = if again { y.exp() } else { y.detach().exp() };
            (y, z)
        },
        |(y, _)| y,
    );
    assert_mismatch(&error, "output 1", "without grad", "with grad");
}

#[test]
fn an_output_that_nobody_used_is_compared_too() {
    let error = diverge(
        |model, x, again| {
            let y = model.forward(x);
            let z = y.narrow(1, 0, if again { 1 } else { 2 });
            (y, z)
        },
        |(y, _)| y,
    );
    assert_mismatch(&error, "output 1", "[5, 2]", "[5, 1]");
}

#[test]
fn outputs_that_change_places_are_an_error() {
    let error = diverge(
        |model, x, again| {
            let (y, z) = (model.forward(x), model.forward(x).sum_dim_intlist(0, false, Kind::Float));
            if again { (z, y) } else { (y, z) }
        },
        |(y, _)| y,
    );
    assert_mismatch(&error, "output 0", "[5, 6]", "[6]");
}

#[test]
fn an_undefined_output_of_a_replay_is_an_error() {
    let error = diverge(|model, x, again| if again { Tensor::new() } else { model.forward(x) }, |y| y);
    assert!(matches!(&error, ReplayError::UndefinedOutput { block, output: 0 } if block == "fickle"), "{error:?}");
}

#[test]
fn an_undefined_output_of_a_forward_is_an_error() {
    let setup = Setup::new(linear);
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("empty", &[("x", &x)], |_, i| (setup.model.forward(&i[0]), Tensor::new()));
    let error = error.unwrap_err();
    assert!(matches!(&error, ReplayError::UndefinedOutput { block, output: 1 } if block == "empty"), "{error:?}");
}

/// An inner block's replay is held to what the inner block did in the outer's replay.
#[test]
fn an_inner_block_that_diverges_is_named() {
    let setup = Setup::new(linear);
    let runs = std::cell::Cell::new(0);
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let (model, runs) = (&setup.model, &runs);
    let y = rollout
        .block("outer", &[("x", &x)], move |rollout, i| {
            rollout.block("fickle", &[("x", &i[0])], move |_, i| {
                runs.set(runs.get() + 1);
                let y = model.forward(&i[0]);
                if runs.get() == 3 { y.narrow(0, 0, 4) } else { y }
            })
        })
        .unwrap();
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert_mismatch(&error, "output 0", "[5, 6]", "[4, 6]");
    assert!(!model.ws.grad().defined());
}
