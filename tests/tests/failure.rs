//! Guarantee *failure*: a block that errs or panics, in its forward or in its replay, leaves old gradients, random
//! number generators, grad mode and autocast as they were before the failing call, and the next rollout is right.

use std::any::Any;
use std::cell::Cell;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};

use replay_runtime::{AutocastGuard, BoxError, Pass, ReplayError, Rollout, is_replaying};
use replay_tests::{Outcome, Setup, assert_same, randn, same_bits};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

const STEPS: usize = 4;

/// The ways in which a body can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Error,
    TorchError,
    PanicStr,
    PanicString,
    PanicValue,
    TorchPanic,
    /// tch's own `no_grad` leaves grad mode off when it is unwound.
    PanicWithoutGrad,
    ErrorInAutocast,
    PanicInAutocast,
}

const FAULTS: [Fault; 9] = [
    Fault::Error,
    Fault::TorchError,
    Fault::PanicStr,
    Fault::PanicString,
    Fault::PanicValue,
    Fault::TorchPanic,
    Fault::PanicWithoutGrad,
    Fault::ErrorInAutocast,
    Fault::PanicInAutocast,
];

impl Fault {
    fn strike(self) -> Result<(), BoxError> {
        match self {
            Self::Error => Err("the pump is dry".into()),
            Self::TorchError => {
                let _ = misfit().f_matmul(&misfit())?;
                Ok(())
            }
            Self::PanicStr => panic!("the pump broke"),
            Self::PanicString => panic!("{}", "the pump broke".to_owned()),
            Self::PanicValue => panic_any(41u32),
            Self::TorchPanic => {
                let _ = misfit().matmul(&misfit());
                Ok(())
            }
            Self::PanicWithoutGrad => tch::no_grad(|| panic!("the pump broke")),
            Self::ErrorInAutocast => {
                let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
                Err("the pump is dry".into())
            }
            Self::PanicInAutocast => {
                let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
                panic!("the pump broke")
            }
        }
    }

    fn panics(self) -> bool {
        !matches!(self, Self::Error | Self::TorchError | Self::ErrorInAutocast)
    }

    fn check_payload(self, payload: &(dyn Any + Send)) {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        match self {
            Self::PanicValue => assert_eq!(payload.downcast_ref::<u32>(), Some(&41)),
            Self::TorchPanic => assert!(text.is_some_and(|text| text.contains("cannot be multiplied")), "{text:?}"),
            _ => assert_eq!(text, Some("the pump broke")),
        }
    }

    fn check_error(self, error: &ReplayError, name: &str, at: Pass) {
        let ReplayError::Block { block, pass, source } = error else { panic!("{error:?}") };
        assert_eq!((block.as_str(), *pass), (name, at));
        let expected = if self == Self::TorchError { "cannot be multiplied" } else { "the pump is dry" };
        assert!(source.to_string().contains(expected), "{source}");
    }
}

fn misfit() -> Tensor {
    Tensor::zeros([2, 3], (Kind::Float, Device::Cpu))
}

/// Runs what fails and checks how it did.
fn assert_fails<T>(fault: Fault, block: &str, pass: Pass, run: impl FnOnce() -> Result<T, ReplayError>) {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(_)) => panic!("{fault:?} went unnoticed"),
        Ok(Err(error)) => {
            assert!(!fault.panics(), "{fault:?} became {error:?}");
            fault.check_error(&error, block, pass);
        }
        Err(payload) => {
            assert!(fault.panics(), "{fault:?} panicked");
            fault.check_payload(&*payload);
        }
    }
    assert_modes_are_default();
}

fn assert_modes_are_default() {
    let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let y = x.matmul(&x);
    assert!(y.requires_grad(), "grad mode was left off");
    assert_eq!(y.kind(), Kind::Float, "autocast was left on");
    assert!(!is_replaying());
}

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn build(old_gradients: bool) -> Setup<nn::Linear> {
    let setup = Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true));
    if old_gradients {
        let leaves = [&setup.model.ws, &setup.leaves[0].1];
        leaves.iter().map(|leaf| leaf.sin().sum(Kind::Float)).reduce(|a, b| a + b).unwrap().backward();
    }
    setup
}

/// A chain with noise that calls `fault` in the body of each step.
fn chain<'m>(
    rollout: &Rollout<'m>,
    setup: &'m Setup<nn::Linear>,
    fault: impl Fn(usize) -> Result<(), BoxError> + Clone + 'm,
) -> Result<Tensor, ReplayError> {
    let mut h = setup.leaves[0].1.shallow_clone();
    for step in 0..STEPS {
        let fault = fault.clone();
        h = rollout.block(&format!("step {step}"), &[("h", &h)], move |_, i| {
            let h = setup.model.forward(&i[0]).tanh().dropout(0.3, true);
            fault(step)?;
            Ok::<_, BoxError>(h)
        })?;
    }
    Ok(h.square().sum(Kind::Float))
}

/// The gradients as they are, with their handles.
fn grads(setup: &Setup<nn::Linear>) -> Vec<(String, Option<(Tensor, usize)>)> {
    let look = |grad: Tensor| (grad.copy(), grad.data_ptr().addr());
    setup.grads().into_iter().map(|(name, grad)| (name, grad.map(look))).collect()
}

fn assert_unchanged(before: &[(String, Option<(Tensor, usize)>)], setup: &Setup<nn::Linear>) {
    for ((name, before), (_, now)) in before.iter().zip(grads(setup)) {
        match (before, now) {
            (None, None) => {}
            (Some((a, at)), Some((b, now_at))) => assert!(same_bits(a, &b) && *at == now_at, "{name}"),
            (before, _) => panic!("{name} had a gradient before: {}", before.is_some()),
        }
    }
}

/// The next rollout over the same variables gives what it gives without a failure before it.
fn assert_next_is_right(setup: &Setup<nn::Linear>, old_gradients: bool) {
    let run = |setup: &Setup<nn::Linear>| {
        tch::manual_seed(11);
        let rollout = Rollout::new(&setup.vs);
        let loss = chain(&rollout, setup, |_| Ok(())).unwrap();
        rollout.backward(&loss).unwrap();
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(&build(old_gradients)), &run(setup));
}

#[test]
fn a_failing_replay_restores_everything() {
    for (fault, at, old) in cases() {
        let setup = build(old);
        let before = grads(&setup);
        let rollout = Rollout::new(&setup.vs);
        let strike = move |step| if step == at && is_replaying() { fault.strike() } else { Ok(()) };
        let loss = chain(&rollout, &setup, strike).unwrap();
        tch::manual_seed(5);
        assert_fails(fault, &format!("step {at}"), Pass::Replay, || rollout.backward(&loss));
        assert!(same_bits(&Tensor::rand([4], (Kind::Float, Device::Cpu)), &first_draw(5)), "{fault:?} {at}");
        assert_unchanged(&before, &setup);
        assert_next_is_right(&setup, old);
    }
}

#[test]
fn a_failing_forward_restores_everything() {
    for (fault, at, old) in cases() {
        let setup = build(old);
        let before = grads(&setup);
        let rollout = Rollout::new(&setup.vs);
        let strike = move |step| {
            if step == at {
                // From here on only what the failing call itself draws counts.
                tch::manual_seed(5);
                let _ = Tensor::rand([7], (Kind::Float, Device::Cpu));
                fault.strike()?;
            }
            Ok(())
        };
        tch::manual_seed(6);
        assert_fails(fault, &format!("step {at}"), Pass::Forward, || chain(&rollout, &setup, strike));
        let draw = Tensor::rand([4], (Kind::Float, Device::Cpu));
        assert!(same_bits(&draw, &draw_after(6, at)), "{fault:?} {at}");
        drop(rollout);
        assert_unchanged(&before, &setup);
        assert_next_is_right(&setup, old);
    }
}

fn cases() -> impl Iterator<Item = (Fault, usize, bool)> {
    let each = FAULTS.into_iter().flat_map(|fault| (0..STEPS).map(move |at| (fault, at)));
    each.flat_map(|(fault, at)| [false, true].map(|old| (fault, at, old)))
}

fn first_draw(seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::rand([4], (Kind::Float, Device::Cpu))
}

/// What is drawn after the first steps of the chain.
fn draw_after(seed: i64, steps: usize) -> Tensor {
    tch::manual_seed(seed);
    for _ in 0..steps {
        let _ = misfit().new_ones([5, 6], (Kind::Float, Device::Cpu)).dropout(0.3, true);
    }
    Tensor::rand([4], (Kind::Float, Device::Cpu))
}

/// The rollout is not spent by a block that failed in its forward.
#[test]
fn a_rollout_goes_on_after_a_block_that_failed_in_its_forward() {
    for fault in FAULTS {
        let run = |fail: bool| {
            let setup = build(false);
            let x = &setup.leaves[0].1;
            let rollout = Rollout::new(&setup.vs);
            let h = rollout.block("first", &[("x", x)], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
            if fail {
                assert_fails(fault, "second", Pass::Forward, || {
                    rollout.block("second", &[("h", &h)], |_, i| fault.strike().map(|()| setup.model.forward(&i[0])))
                });
            }
            let h = rollout.block("third", &[("h", &h)], |_, i| setup.model.forward(&i[0]).sin()).unwrap();
            let loss = h.sum(Kind::Float);
            rollout.backward(&loss).unwrap();
            Outcome { loss: loss.detach(), grads: setup.grads() }
        };
        assert_same(&run(false), &run(true));
    }
}

/// The inner block runs three times: in the outer's forward, in the outer's replay, and in its own.
#[test]
fn a_failure_in_any_run_of_an_inner_block_restores_everything() {
    for fault in FAULTS {
        for run in 1..=3 {
            let setup = build(true);
            let before = grads(&setup);
            let runs = Cell::new(0);
            let rollout = Rollout::new(&setup.vs);
            let outcome = catch_unwind(AssertUnwindSafe(|| nested(rollout, &setup, &runs, run, fault)));
            match outcome {
                Ok(outcome) => check_nested_error(fault, run, &outcome.unwrap_err()),
                Err(payload) => fault.check_payload(&*payload),
            }
            assert_eq!(runs.get(), run);
            assert_modes_are_default();
            assert_unchanged(&before, &setup);
            assert_next_is_right(&setup, true);
        }
    }
}

fn nested<'m>(
    rollout: Rollout<'m>,
    setup: &'m Setup<nn::Linear>,
    runs: &'m Cell<u32>,
    fails_at: u32,
    fault: Fault,
) -> Result<(), ReplayError> {
    let h = rollout.block("before", &[("x", &setup.leaves[0].1)], |_, i| setup.model.forward(&i[0]))?;
    let y = rollout.block("outer", &[("h", &h)], move |rollout, i| {
        let h = i[0].sin();
        rollout.block("inner", &[("h", &h)], move |_, i| {
            runs.set(runs.get() + 1);
            if runs.get() == fails_at {
                fault.strike()?;
            }
            Ok::<_, BoxError>(setup.model.forward(&i[0]).tanh())
        })
    })?;
    let y = rollout.block("after", &[("y", &y)], |_, i| setup.model.forward(&i[0]))?;
    rollout.backward(&y.sum(Kind::Float)).map(drop)
}

/// An inner block's error in a run of the outer one is the source of the outer's error; in its own replay it is
/// the error itself.
fn check_nested_error(fault: Fault, run: u32, error: &ReplayError) {
    if run == 3 {
        return fault.check_error(error, "inner", Pass::Replay);
    }
    let ReplayError::Block { block, pass, source } = error else { panic!("{error:?}") };
    let outer_pass = if run == 1 { Pass::Forward } else { Pass::Replay };
    assert_eq!((block.as_str(), *pass), ("outer", outer_pass));
    fault.check_error(source.downcast_ref().unwrap(), "inner", Pass::Forward);
}

/// A trainable tensor of no store, which a body captures, is part of the transaction.
#[test]
fn a_captured_leaf_gets_its_gradient_back() {
    for old in [false, true] {
        let setup = build(false);
        let scale = randn(3, &[6], Kind::Float).set_requires_grad(true);
        if old {
            scale.sin().sum(Kind::Float).backward();
        }
        let before = scale.grad();
        let copy = before.defined().then(|| before.copy());
        let x = &setup.leaves[0].1;
        let rollout = Rollout::new(&setup.vs);
        let h = rollout.block("first", &[("x", x)], |_, i| {
            if is_replaying() { Err("no second time") } else { Ok(setup.model.forward(&i[0])) }
        });
        let h = rollout.block("last", &[("h", &h.unwrap())], |_, i| &i[0] * &scale).unwrap();
        rollout.backward(&h.sum(Kind::Float)).unwrap_err();
        assert_eq!(scale.grad().defined(), old);
        if let Some(copy) = copy {
            assert!(same_bits(&scale.grad(), &copy) && scale.grad().data_ptr() == before.data_ptr());
        }
    }
}

/// The graph around the blocks fails where LibTorch finds a saved tensor changed.
#[test]
fn a_failure_around_the_blocks_restores_gradients() {
    let setup = build(true);
    let before = grads(&setup);
    let rollout = Rollout::new(&setup.vs);
    let mut h = setup.leaves[0].1.exp();
    let y = rollout.block("step", &[("h", &h.detach().copy())], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
    let loss = (&h * 2.0).sum(Kind::Float) + y.sum(Kind::Float);
    let _ = tch::no_grad(|| h.g_add_scalar_(1.0));
    let error = rollout.backward(&loss).unwrap_err();
    assert!(error.source().is_some() && error.to_string().lines().count() <= 2, "{error}");
    assert_unchanged(&before, &setup);
}

#[test]
fn messages_are_short_and_sources_are_kept() {
    let setup = build(false);
    let x = &setup.leaves[0].1;
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("step", &[("x", x)], |_, i| i[0].f_matmul(&i[0])).unwrap_err();
    let ReplayError::Block { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.downcast_ref::<tch::TchError>().is_some());
    assert!(error.to_string().contains("`step`"), "{error}");
}
