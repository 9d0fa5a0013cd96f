//! The state of an optimizer, read from one and set in another.

use tch::nn::{Adam, AdamW, RmsProp, Sgd};
use tch::{Device, Kind};

use super::*;

/// Two matrices, the second with a gradient in every other step only, and one without elements.
fn store() -> nn::VarStore {
    let vs = nn::VarStore::new(Device::Cpu);
    let values = Tensor::arange(6, (Kind::Float, Device::Cpu)).reshape([2, 3]) / 7.0;
    for name in ["always", "sometimes"] {
        let _ = vs.root().var_copy(name, &values);
    }
    let _ = vs.root().set_group(4).var("empty", &[0], nn::Init::Const(0.0));
    vs
}

/// Gradients that depend on the values, so that a difference stays.
fn set_gradients(vs: &nn::VarStore, step: u32) {
    for (name, variable) in vs.variables() {
        let grad = (&variable.detach() * 0.3 + f64::from(step).sin()).sin();
        let none = name == "sometimes" && step.is_multiple_of(2);
        ffi::set_grad(&variable, (!none).then_some(&grad)).unwrap();
    }
}

fn train(vs: &nn::VarStore, optimizer: &mut Optimizer, steps: std::ops::Range<u32>) {
    for step in steps {
        set_gradients(vs, step);
        optimizer.step().unwrap();
    }
}

fn copy_values(from: &nn::VarStore, to: &nn::VarStore) {
    let values = from.variables();
    tch::no_grad(|| to.variables().into_iter().for_each(|(name, mut variable)| variable.copy_(&values[&name])));
}

fn assert_same(a: &nn::VarStore, b: &nn::VarStore, what: &str) {
    let values = b.variables();
    for (name, variable) in a.variables() {
        assert!(ffi::same_bits(&variable, &values[&name]), "{what}: {name}");
    }
}

fn algorithms() -> Vec<Algorithm> {
    let nesterov = Sgd { momentum: 0.9, wd: 0.1, nesterov: true, ..Sgd::default() };
    let centered = RmsProp { momentum: 0.9, centered: true, ..RmsProp::default() };
    vec![
        Sgd::default().into(),
        Sgd { momentum: 0.9, dampening: 0.1, ..Sgd::default() }.into(),
        nesterov.into(),
        Adam::default().wd(0.1).into(),
        Adam::default().amsgrad(true).into(),
        AdamW::default().into(),
        AdamW::default().amsgrad(true).into(),
        RmsProp::default().into(),
        centered.into(),
    ]
}

fn resume(from: &Optimizer, into: &mut Optimizer) {
    let names: Vec<_> = from.names().map(str::to_owned).collect();
    for name in names {
        into.set_state(&name, from.state(&name).unwrap().as_ref()).unwrap();
    }
    into.set_lrs(&from.lrs()).unwrap();
}

#[test]
fn a_state_set_in_another_optimizer_goes_on_with_the_same_bits() {
    for algorithm in algorithms() {
        let (vs, again) = (store(), store());
        let mut optimizer = Optimizer::new(&vs, algorithm, 0.05).unwrap();
        train(&vs, &mut optimizer, 0..4);
        optimizer.set_lr_group(0, 0.02).unwrap();

        let mut resumed = Optimizer::new(&again, algorithm, 0.05).unwrap();
        // What it has of its own is replaced.
        train(&again, &mut resumed, 5..6);
        copy_values(&vs, &again);
        resume(&optimizer, &mut resumed);
        assert_same(&again, &vs, "before");
        train(&vs, &mut optimizer, 4..10);
        train(&again, &mut resumed, 4..10);
        assert_same(&again, &vs, &format!("{algorithm:?}"));
    }
}

#[test]
fn a_state_has_the_tensors_of_its_algorithm() {
    let expected: [&[&str]; 9] = [
        &[],
        &["momentum_buffer"],
        &["momentum_buffer"],
        &["exp_avg", "exp_avg_sq"],
        &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        &["exp_avg", "exp_avg_sq"],
        &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        &["square_avg"],
        &["square_avg", "momentum_buffer", "grad_avg"],
    ];
    for (algorithm, expected) in algorithms().into_iter().zip(expected) {
        let vs = store();
        let mut optimizer = Optimizer::new(&vs, algorithm, 0.05).unwrap();
        assert_eq!(optimizer.names().collect::<Vec<_>>(), ["always", "empty", "sometimes"]);
        assert!(optimizer.state("always").unwrap().is_none());
        train(&vs, &mut optimizer, 0..1);
        assert!(optimizer.state("sometimes").unwrap().is_none());
        train(&vs, &mut optimizer, 1..3);
        let Some(state) = optimizer.state("always").unwrap() else {
            assert!(expected.is_empty(), "{algorithm:?}");
            continue;
        };
        let names: Vec<_> = state.tensors.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, expected, "{algorithm:?}");
        assert!(state.tensors.iter().all(|(_, tensor)| tensor.size() == [2, 3] && !tensor.requires_grad()));
        assert!(names.iter().all(|name| optimizer.state_names().contains(name)));
        let steps = if optimizer.algorithm_name() == "SGD" { (0, 0) } else { (3, 1) };
        assert_eq!((state.step, optimizer.state("sometimes").unwrap().unwrap().step), steps);
    }
}

#[test]
fn a_state_s_tensors_are_what_their_names_say() {
    let cases: [(Algorithm, &[(&str, f64)]); 3] = [
        (Sgd { momentum: 0.9, ..Sgd::default() }.into(), &[("momentum_buffer", -2.0)]),
        (AdamW::default().amsgrad(true).into(), &[("exp_avg", -0.2), ("exp_avg_sq", 0.004), ("max_exp_avg_sq", 0.004)]),
        (
            RmsProp { momentum: 0.9, centered: true, ..RmsProp::default() }.into(),
            // The gradient over the root of the variance, 0.04 - 0.02 * 0.02.
            &[("square_avg", 0.04), ("momentum_buffer", -2.0 / 0.0396_f64.sqrt()), ("grad_avg", -0.02)],
        ),
    ];
    for (algorithm, expected) in cases {
        let vs = store();
        let always = vs.variables()["always"].shallow_clone();
        ffi::set_grad(&always, Some(&always.detach().full_like(-2.0))).unwrap();
        let mut optimizer = Optimizer::new(&vs, algorithm, 0.05).unwrap();
        optimizer.step().unwrap();
        let state = optimizer.state("always").unwrap().unwrap();
        for ((name, tensor), (expected_name, expected)) in state.tensors.iter().zip(expected) {
            assert_eq!(name, expected_name);
            let found = tensor.double_value(&[0, 0]);
            assert!((found / expected - 1.0).abs() < 1e-4, "{name} of {algorithm:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn a_state_that_is_removed_begins_anew() {
    let (vs, again) = (store(), store());
    let mut optimizer = Optimizer::new(&vs, AdamW::default(), 0.05).unwrap();
    train(&vs, &mut optimizer, 0..3);
    copy_values(&vs, &again);
    for name in ["always", "sometimes", "empty", "always"] {
        optimizer.set_state(name, None).unwrap();
        assert!(optimizer.state(name).unwrap().is_none());
    }
    let mut fresh = Optimizer::new(&again, AdamW::default(), 0.05).unwrap();
    train(&vs, &mut optimizer, 3..6);
    train(&again, &mut fresh, 3..6);
    assert_same(&again, &vs, "begun anew");
}

#[test]
fn a_state_is_read_as_it_is_and_set_as_a_copy() {
    let vs = store();
    let mut optimizer = Optimizer::new(&vs, Adam::default(), 0.05).unwrap();
    train(&vs, &mut optimizer, 0..1);
    let state = optimizer.state("always").unwrap().unwrap();
    let address = |state: &ParamState| state.tensors[0].1.data_ptr();
    assert_eq!(address(&state), address(&optimizer.state("always").unwrap().unwrap()));
    optimizer.set_state("always", Some(&state)).unwrap();
    assert_ne!(address(&state), address(&optimizer.state("always").unwrap().unwrap()));
    let before = state.tensors[0].1.copy();
    train(&vs, &mut optimizer, 1..2);
    assert!(ffi::same_bits(&before, &state.tensors[0].1));
}

fn zeros(names: &[&'static str], size: &[i64], kind: Kind) -> Vec<(&'static str, Tensor)> {
    names.iter().map(|name| (*name, Tensor::zeros(size, (kind, Device::Cpu)))).collect()
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let vs = store();
    let adam = ["exp_avg", "exp_avg_sq"];
    let (size, other) = ([2, 3], [3]);
    let cases: [(Algorithm, u64, Vec<_>, &str); 9] = [
        (Adam::default().into(), 1, zeros(&["exp_avg"], &size, Kind::Float), "`always` has no `exp_avg_sq`"),
        (Adam::default().into(), 1, zeros(&adam, &other, Kind::Float), "`always` is [3], not [2, 3]"),
        (Adam::default().into(), 1, zeros(&adam, &size, Kind::Int), "`always` is Int, not of real or complex numbers"),
        (Adam::default().into(), u64::MAX, zeros(&adam, &size, Kind::Float), "cannot have made"),
        (Adam::default().into(), 1, zeros(&["grad_avg"], &size, Kind::Float), "is called `grad_avg`; it has `exp_avg`"),
        (Adam::default().into(), 1, zeros(&["exp_avg", "exp_avg"], &size, Kind::Float), "has `exp_avg` twice"),
        (Adam::default().amsgrad(true).into(), 1, zeros(&adam, &size, Kind::Float), "has no `max_exp_avg_sq`"),
        (Sgd::default().into(), 1, zeros(&["momentum_buffer"], &size, Kind::Float), "SGD counts no steps"),
        (Sgd::default().into(), 0, Vec::new(), "has no `momentum_buffer`"),
    ];
    for (algorithm, step, tensors, expected) in cases {
        let mut optimizer = Optimizer::new(&vs, algorithm, 0.05).unwrap();
        let error = optimizer.set_state("always", Some(&ParamState { step, tensors })).unwrap_err();
        assert!(error.brief.contains(expected), "{}", error.brief);
        assert!(optimizer.state("always").unwrap().is_none());
    }
    let mut optimizer = Optimizer::new(&vs, Adam::default(), 0.05).unwrap();
    assert!(optimizer.set_state("nobody", None).unwrap_err().brief.contains("no parameter `nobody`"));
    assert!(optimizer.state("nobody").unwrap_err().brief.contains("no parameter `nobody`"));
}

#[test]
fn a_state_lacks_what_an_option_asks_for_later() {
    let (vs, before) = (store(), store());
    let mut optimizer = Optimizer::new(&vs, RmsProp::default(), 0.05).unwrap();
    train(&vs, &mut optimizer, 0..2);
    optimizer.set_momentum(0.9).unwrap();
    copy_values(&vs, &before);
    set_gradients(&vs, 2);
    let error = optimizer.step().unwrap_err().to_string();
    assert!(error.contains("parameter `always` has no `momentum_buffer`"), "{error}");
    assert_same(&before, &vs, "refused");
}

#[test]
fn nothing_changes_where_a_shape_no_longer_fits() {
    let (vs, before) = (store(), store());
    let mut optimizer = Optimizer::new(&vs, AdamW::default(), 0.05).unwrap();
    train(&vs, &mut optimizer, 0..2);
    copy_values(&vs, &before);
    let mut last = vs.variables()["sometimes"].shallow_clone();
    let was = last.detach();
    let ones = |size: i64| Tensor::ones([size], (Kind::Float, Device::Cpu));
    // LibTorch would broadcast.
    for (value, grad, expected) in [
        (ones(3), ones(3), "`sometimes` was [2, 3] when the optimizer was made, and is [3]"),
        (was.shallow_clone(), ones(1), "the gradient of parameter `sometimes` is [1], not [2, 3]"),
    ] {
        set_gradients(&vs, 3);
        tch::no_grad(|| last.set_data(&value));
        ffi::set_grad(&last, Some(&grad)).unwrap();
        let error = optimizer.step().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        tch::no_grad(|| last.set_data(&was));
        assert_same(&before, &vs, expected);
        assert_eq!(optimizer.state("always").unwrap().unwrap().step, 2);
    }
    train(&vs, &mut optimizer, 3..4);
}

#[test]
fn a_variable_with_two_names_is_one_parameter() {
    let (vs, plain) = (store(), store());
    let alias = vs.variables()["always"].shallow_clone();
    vs.variables_.lock().unwrap().named_variables.insert("zz".to_owned(), alias);
    let mut optimizer = Optimizer::new(&vs, AdamW::default(), 0.05).unwrap();
    assert_eq!(optimizer.names().collect::<Vec<_>>(), ["always", "empty", "sometimes"]);
    let mut once = Optimizer::new(&plain, AdamW::default(), 0.05).unwrap();
    train(&vs, &mut optimizer, 0..3);
    train(&plain, &mut once, 0..3);
    assert_same(&plain, &vs, "two names");
}

#[test]
fn learning_rates_are_set_all_or_none() {
    let vs = store();
    let mut optimizer = Optimizer::new(&vs, Sgd::default(), 0.05).unwrap();
    optimizer.set_lrs(&[0.1, 0.2]).unwrap();
    assert_eq!((optimizer.lr(0).unwrap(), optimizer.lr(4).unwrap()), (0.1, 0.2));
    assert!(optimizer.set_lrs(&[0.3]).unwrap_err().brief.contains("1 learning rates for an optimizer of 2 groups"));
    assert!(optimizer.set_lrs(&[0.3, -1.0]).unwrap_err().brief.contains("learning rate of -1"));
    assert_eq!(optimizer.lrs(), [0.1, 0.2]);
}
