//! Guarantee *versions*, for inputs of every kind and every way to change one: the gradient is that of the values that
//! the forward saw, or there is an error that names the input.

use replay_runtime::{ReplayError, Rollout, replay_block};
use replay_tests::{Setup, randn, same_bits};
use tch::{Kind, Tensor, nn};

type Change = fn(&mut Tensor);

/// The ways to change a tensor, by what they go through.
const CHANGES: [(&str, Change); 8] = [
    ("itself", |x| drop(x.fill_(3.0))),
    ("one element", |x| drop(x.view(-1).get(0).fill_(3.0))),
    ("a detached twin", |x| drop(x.detach().fill_(3.0))),
    ("an alias", |x| x.shallow_clone().copy_(&x.ones_like())),
    ("its data", |x| drop(x.data().fill_(3.0))),
    ("a larger size", |x| drop(x.resize_([100]))),
    ("a smaller size", |x| drop(x.resize_([1]))),
    ("other storage", |x| x.set_data(&x.ones_like())),
];

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[1], nn::Init::Const(1.5)))
}

/// Inputs of each kind, none of which requires grad.
fn inputs() -> Vec<Tensor> {
    let kinds = [
        Kind::Float,
        Kind::Double,
        Kind::BFloat16,
        Kind::Half,
        Kind::ComplexFloat,
        Kind::Int64,
        Kind::Uint8,
        Kind::Bool,
    ];
    kinds.map(|kind| (randn(1, &[12], Kind::Float).abs() * 1.5).floor().to_kind(kind)).into_iter().collect()
}

/// The gradient of the weight by a block that reads `x` second, with `change` between forward and replay.
fn gradient(mut x: Tensor, offload: bool, change: impl FnOnce(&mut Tensor)) -> Result<Tensor, ReplayError> {
    let setup = setup();
    let rollout = Rollout::builder(&setup.vs).offload(offload).build();
    let inputs = [("first", &randn(2, &[12], Kind::Float)), ("changed", &x)];
    let y = rollout.block("reads", &inputs, |_, i| {
        let second = if i[1].is_complex() { i[1].abs() } else { i[1].to_kind(Kind::Float) };
        (&i[0] * second * &setup.model).sin()
    })?;
    let loss = y.sum(Kind::Float);
    change(&mut x);
    rollout.backward(&loss)?;
    Ok(setup.model.grad())
}

#[test]
fn every_change_of_every_kind_is_an_error_or_changes_nothing() {
    for offload in [false, true] {
        for x in inputs() {
            let expected = gradient(x.copy(), offload, |_| {}).unwrap();
            for (name, change) in CHANGES {
                let case = format!("{name} of {:?}, offload: {offload}", x.kind());
                match gradient(x.copy(), offload, change) {
                    Ok(found) => {
                        assert!(same_bits(&expected, &found), "{case}: another gradient");
                        assert!(
                            ["other storage", "a larger size", "a smaller size"].contains(&name),
                            "{case}: unnoticed"
                        );
                    }
                    Err(error) => {
                        let named = matches!(&error, ReplayError::InputChanged { input, .. } if input == "changed");
                        assert!(named, "{case}: {error}");
                    }
                }
            }
        }
    }
}

/// A sparse tensor's values and indices are tensors of their own, with versions of their own.
#[test]
fn a_sparse_input_changed_through_its_values() {
    let run = |change: Change| {
        let setup = setup();
        let mut x = randn(1, &[12], Kind::Float).relu().to_sparse(None, None::<&[i64]>, None);
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("reads", &[("x", &x)], |_, i| i[0].to_dense(None::<Kind>, false) * &setup.model).unwrap();
        change(&mut x);
        rollout.backward(&y.sum(Kind::Float)).map(|_| setup.model.grad())
    };
    let _ = run(|_| {}).unwrap();
    let changes: [Change; 3] = [
        |x| drop(x.internal_values().fill_(3.0)),
        |x| drop(x.internal_indices().zero_()),
        |x| drop(x.f_mul_(&Tensor::from(2f32)).expect("LibTorch scales sparse tensors in place")),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let error = run(change).expect_err("it was changed");
        assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "x"), "change {i}: {error}");
    }
}

#[replay_block]
fn product(a: &Tensor, b: &Tensor) -> Tensor {
    (a * b).sin()
}

#[replay_block]
fn maybe(a: &Tensor, b: Option<&Tensor>, #[meta] scale: f64) -> Tensor {
    b.map_or_else(|| a * scale, |b| (a * b).sin() * scale)
}

/// sin(a b) at a = 2 and b = 3: the slope in a is 3 cos 6, which is 2.8805. One more in b gives -0.582 elsewhere.
#[test]
fn a_named_input_changed_before_the_backward_pass() {
    let vs = nn::VarStore::new(tch::Device::Cpu);
    for change in [false, true] {
        let (a, mut b) = (Tensor::from(2f64).set_requires_grad(true), Tensor::from(3f64));
        let rollout = Rollout::new(&vs);
        let y = product_replay(&rollout, &a, &b).unwrap();
        if change {
            let _ = b.g_add_scalar_(1.0);
            let error = rollout.backward(&y).unwrap_err();
            assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "b"), "{error}");
            assert!(!a.grad().defined());
        } else {
            rollout.backward(&y).unwrap();
            assert!((a.grad().double_value(&[]) - 2.8805).abs() < 1e-4);
        }
    }
}

#[test]
fn an_optional_input_changed_before_the_backward_pass() {
    let vs = nn::VarStore::new(tch::Device::Cpu);
    let (a, mut b) = (Tensor::from(2f64).set_requires_grad(true), Tensor::from(3f64));
    let rollout = Rollout::new(&vs);
    let y = maybe_replay(&rollout, &a, Some(&b), 1.0).unwrap();
    let _ = b.g_add_scalar_(1.0);
    let error = rollout.backward(&y).unwrap_err();
    assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "b"), "{error}");

    let rollout = Rollout::new(&vs);
    let y = maybe_replay(&rollout, &a, None, 5.0).unwrap();
    let _ = b.g_add_scalar_(1.0);
    rollout.backward(&y).unwrap();
    assert!((a.grad().double_value(&[]) - 5.0).abs() < 1e-12);
}

/// Offload keeps CPU inputs where they are, and the watch over them: the gradient of 2 x at x = 3 with `x += 100`.
#[test]
fn offload_watches_cpu_inputs() {
    let vs = nn::VarStore::new(tch::Device::Cpu);
    let mut x = Tensor::from(3f64);
    let w = Tensor::from(2f64).set_requires_grad(true);
    let rollout = Rollout::builder(&vs).offload(true).build();
    let y = rollout.block("double", &[("x", &x)], |_, i| &i[0] * &w * 2.0).unwrap();
    let _ = x.g_add_scalar_(100.0);
    let error = rollout.backward(&y).unwrap_err();
    assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "x"), "{error}");
}

/// Whether an input has a gradient is settled in the forward, as in plain autograd.
#[test]
fn an_input_frozen_or_unfrozen_after_the_forward() {
    let run = |replay: bool, first: bool| {
        let setup = setup();
        let x = randn(1, &[12], Kind::Float).set_requires_grad(first);
        let rollout = Rollout::new(&setup.vs);
        let body = |x: &Tensor| (x * &setup.model).sin();
        let y = if replay { rollout.block("step", &[("x", &x)], move |_, i| body(&i[0])).unwrap() } else { body(&x) };
        let _ = x.set_requires_grad(!first);
        let loss = y.sum(Kind::Float);
        if replay {
            rollout.backward(&loss).unwrap();
        } else {
            loss.backward();
        }
        (setup.model.grad(), x.grad().defined())
    };
    for first in [false, true] {
        let (plain, replayed) = (run(false, first), run(true, first));
        assert!(same_bits(&plain.0, &replayed.0) && plain.1 == replayed.1);
    }
}
