//! Guarantee *determinism* with `Check::Values`: a replay whose outputs differ in a bit is an error that names block, output and
//! the largest difference.

use std::cell::Cell;

use replay_runtime::{BoxError, Check, ReplayContext, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::{Setup, randn, same_bits};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

/// Runs a block with a differentiable output and one that `other` makes, which is told whether it is replayed.
fn outcome(check: Check, other: impl Fn(bool, &Tensor) -> Tensor) -> Result<(), ReplayError> {
    let setup = Setup::new(linear);
    let rollout = Rollout::builder(&setup.vs).check(check).build();
    let x = randn(1, &[4, 6], Kind::Float);
    let (y, _): (Tensor, Tensor) = rollout.block("step", &[("x", &x)], |_, i| {
        let y = setup.model.forward(&i[0]).tanh();
        let other = other(is_replaying(), &y);
        (y, other)
    })?;
    let outcome = rollout.backward(&y.sum(Kind::Float)).map(drop);
    assert_eq!(setup.model.ws.grad().defined(), outcome.is_ok(), "gradients after a failure");
    outcome
}

/// The difference that is reported for the second output.
fn difference(other: impl Fn(bool, &Tensor) -> Tensor) -> f64 {
    outcome(Check::Metadata, &other).expect("without the option nobody looks at values");
    match outcome(Check::Values, other) {
        Err(ReplayError::ValuesDiffer { block, output: 1, difference }) if block == "step" => difference,
        other => panic!("{other:?}"),
    }
}

fn full(kind: Kind, value: f64) -> Tensor {
    Tensor::ones([3], (Kind::Double, Device::Cpu)).g_mul_scalar(value).to_kind(kind)
}

#[test]
fn a_drift_of_values_is_an_error() {
    let setup = Setup::new(linear);
    let scale = Cell::new(2.0);
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let x = Tensor::ones([4, 6], (Kind::Float, Device::Cpu));
    let y = rollout.block("drifts", &[("x", &x)], |_, i| (setup.model.forward(&i[0]), &i[0] * scale.get())).unwrap();
    scale.set(2.5);
    let error = rollout.backward(&y.0.sum(Kind::Float)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("`drifts`") && text.contains("output 1") && text.contains("5e-1"), "{text}");
    assert_eq!(text.lines().count(), 2);
}

/// A constant that the closure holds and whose storage is filled anew between forward and replay: nothing else watches it.
#[test]
fn a_captured_constant_that_was_filled_anew_is_an_error() {
    let setup = Setup::new(linear);
    let mut table = randn(3, &[6], Kind::Float);
    let held = table.shallow_clone();
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let y = rollout
        .block("reads", &[("x", &randn(2, &[5, 6], Kind::Float))], |_, i| setup.model.forward(&i[0]) * &held)
        .unwrap();
    let _ = table.fill_(9.0);
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::ValuesDiffer { block, output: 0, .. } if block == "reads"), "{error}");
    assert!(!setup.model.ws.grad().defined());
}

/// Another kernel of the same shape and kind: a switch in the model that nobody puts back.
#[test]
fn another_kernel_of_the_same_shape_is_an_error() {
    let exact = Cell::new(true);
    let setup = Setup::new(linear);
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let y = rollout.block("switches", &[("x", &randn(2, &[5, 6], Kind::Float))], |_, i| {
        setup.model.forward(&i[0]).gelu(if exact.get() { "none" } else { "tanh" })
    });
    exact.set(false);
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::ValuesDiffer { .. }), "{error}");
}

#[test]
fn every_kind_is_compared() {
    for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Int, Kind::Uint8] {
        let found = difference(|again, _| full(kind, if again { 3.0 } else { 1.0 }));
        assert!((found - 2.0).abs() < 1e-9, "{kind:?}: {found}");
    }
    let bools = difference(|again, _| full(Kind::Bool, f64::from(again)));
    assert!((bools - 1.0).abs() < 1e-9);
    let complex = difference(|again, _| Tensor::complex(&full(Kind::Float, 0.0), &full(Kind::Float, f64::from(again))));
    assert!((complex - 1.0).abs() < 1e-9);
    let sparse = difference(|again, _| full(Kind::Float, if again { 4.0 } else { 2.0 }).to_sparse_sparse_dim(1));
    assert!((sparse - 2.0).abs() < 1e-9);
}

#[test]
fn a_single_bit_counts() {
    let last = |again: bool| if again { 1.0 } else { 1.0 + f64::EPSILON };
    let found = difference(|again, _| full(Kind::Double, last(again)));
    assert!((found - f64::EPSILON).abs() < f64::EPSILON / 2.0);
    let zero = difference(|again, _| full(Kind::Float, if again { -0.0 } else { 0.0 }));
    assert!(zero == 0.0, "the two zeros differ in a bit, by nothing: {zero}");
    let nan = difference(|again, _| full(Kind::Float, if again { f64::NAN } else { 0.0 }));
    assert!(nan.is_nan());
}

#[test]
fn the_output_that_is_differentiated_is_compared_too() {
    let setup = Setup::new(linear);
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let x = randn(1, &[4, 6], Kind::Float);
    let y =
        rollout.block("step", &[("x", &x)], |_, i| setup.model.forward(&i[0]) + f64::from(u8::from(is_replaying())));
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::ValuesDiffer { output: 0, .. }), "{error:?}");
}

#[test]
fn what_is_equal_passes() {
    outcome(Check::Values, |_, y| y * 2.0).unwrap();
    outcome(Check::Values, |_, y| y.transpose(0, 1)).unwrap();
    outcome(Check::Values, |_, _| full(Kind::Float, f64::NAN)).unwrap();
    outcome(Check::Values, |_, y| y.narrow(0, 0, 0)).unwrap();
    outcome(Check::Values, |_, y| y.narrow(0, 0, 1).expand([4, 6], false)).unwrap();
    outcome(Check::Values, |_, y| y.dropout(0.5, true)).unwrap();
    outcome(Check::Values, |_, _| Tensor::from(3_i64)).unwrap();
    outcome(Check::Values, |_, y| y.view([-1, 2]).view_as_complex().conj()).unwrap();
    outcome(Check::Values, |_, y| y.view([-1, 2]).view_as_complex().conj().imag()).unwrap();
    // One number alone is contiguous.
    outcome(Check::Values, |_, y| y.view([-1, 2]).view_as_complex().conj().imag().narrow(0, 3, 1)).unwrap();
}

/// A layout is no value: the same numbers with other strides are the same.
#[test]
fn strides_are_no_values() {
    outcome(Check::Values, |again, y| {
        let t = y.transpose(0, 1);
        if again { t.contiguous() } else { t }
    })
    .unwrap();
}

/// The caller may change what it was given: a copy is compared.
#[test]
fn outputs_that_the_caller_changes_are_no_drift() {
    let setup = Setup::new(linear);
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let x = randn(1, &[4, 6], Kind::Float);
    let mut y = rollout.block("step", &[("x", &x)], |_, i| setup.model.forward(&i[0])).unwrap();
    let _ = y.g_mul_scalar_(3.0);
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    let expected = Tensor::ones([4, 6], (Kind::Float, Device::Cpu)).tr().matmul(&x) * 3.0;
    assert!((expected - setup.model.ws.grad()).abs().max().double_value(&[]) < 1e-4);
}

#[test]
fn an_inner_block_that_drifts_is_named() {
    let setup = Setup::new(linear);
    let model = &setup.model;
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let runs = Cell::new(0);
    let count = &runs;
    let x = randn(1, &[4, 6], Kind::Float);
    let y = rollout.block("outer", &[("x", &x)], move |rollout, i| {
        rollout.block("inner", &[("h", &i[0])], move |_, i| {
            count.set(count.get() + 1);
            // The third run is the inner block's own replay.
            model.forward(&i[0]) * if count.get() == 3 { 2.0 } else { 1.0 }
        })
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::ValuesDiffer { block, .. } if block == "inner"), "{error:?}");
}

/// Numbers that do not come from LibTorch: a context puts their generator back, and without one the values tell.
#[test]
fn a_generator_of_the_users_own() {
    struct Noisy {
        weight: Tensor,
        seed: Cell<u32>,
    }
    struct Put<'a>(&'a Cell<u32>, Option<u32>);
    impl Drop for Put<'_> {
        fn drop(&mut self) {
            self.1.iter().for_each(|&seed| self.0.set(seed));
        }
    }
    struct Seed<'a>(&'a Cell<u32>, u32);
    impl ReplayContext for Seed<'_> {
        type Scope<'s>
            = Put<'s>
        where
            Self: 's;
        fn forward(&self) -> Result<Put<'_>, BoxError> {
            Ok(Put(self.0, None))
        }
        fn replay(&self) -> Result<Put<'_>, BoxError> {
            Ok(Put(self.0, Some(self.0.replace(self.1))))
        }
    }
    impl Noisy {
        fn draw(&self) -> f64 {
            self.seed.set(self.seed.get().wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
            f64::from(self.seed.get() >> 8) / f64::from(1 << 24)
        }
        fn context(&self) -> Seed<'_> {
            Seed(&self.seed, self.seed.get())
        }
        #[replay_block]
        fn bare(&self, x: &Tensor) -> Tensor {
            x * &self.weight * self.draw()
        }
        #[replay_block(context = Self::context)]
        fn kept(&self, x: &Tensor) -> Tensor {
            x * &self.weight * self.draw()
        }
    }
    let setup = Setup::new(|path| Noisy { weight: path.ones("weight", &[1]), seed: Cell::new(7) });
    let x = Tensor::ones([1], (Kind::Float, Device::Cpu));
    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let y = setup.model.bare_replay(&rollout, &x).unwrap();
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::ValuesDiffer { .. }), "{error:?}");

    let rollout = Rollout::builder(&setup.vs).check(Check::Values).build();
    let h = setup.model.kept_replay(&rollout, &x).unwrap();
    let y = setup.model.kept_replay(&rollout, &h).unwrap();
    let seed = setup.model.seed.get();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(setup.model.seed.get(), seed);
    // y is the product of both draws times the square of the weight, which is one.
    let difference = (setup.model.weight.grad() - &y * 2.0).abs().max().double_value(&[]);
    assert!(difference < 1e-6, "{difference}");
}

/// Gradients are those of a rollout that does not compare.
#[test]
fn comparing_changes_nothing() {
    let run = |check| {
        let setup = Setup::new(linear);
        let rollout = Rollout::builder(&setup.vs).check(check).build();
        let mut h = randn(1, &[4, 6], Kind::Float);
        for _ in 0..4 {
            h = rollout
                .block("step", &[("h", &h)], |_, i| setup.model.forward(&i[0]).tanh().dropout(0.3, true))
                .unwrap();
        }
        rollout.backward(&h.square().sum(Kind::Float)).unwrap();
        setup.model.ws.grad()
    };
    assert!(same_bits(&run(Check::Metadata), &run(Check::Values)));
}

#[test]
fn outputs_in_compressed_sparse_layout_are_compared() {
    let compressed = |value: f64| (Tensor::eye(3, (Kind::Float, Device::Cpu)) * value).to_sparse_csr(None);
    outcome(Check::Values, |_, _| compressed(1.0)).unwrap();
    let found = difference(|again, _| compressed(if again { 3.0 } else { 1.0 }));
    assert!((found - 2.0).abs() < 1e-9, "{found}");
}
