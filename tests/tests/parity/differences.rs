//! What differs from the reference on purpose. A file holds what the reference makes of a configuration and what plain
//! autograd makes of it; here the latter holds, or what cannot be right is an error. The counterpart of
//! `tests/parity/differences.py`, which says what the reference does.
//!
//! Some differences have no file: a tensor in a container and an output that is no tensor do not compile here
//! (`ui.rs`), and a parameter as output, on which the reference's backward pass never ends, is right here
//! (`outputs.rs`).

use std::cell::Cell;

use replay_runtime::{AutocastGuard, BoxError, Pass, ReplayContext, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::same_bits;
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

use crate::run::{Case, Run, check_differs};

fn layer(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path / "linear", 6, 6, nn::LinearConfig::default())
}

/// The layer as a block.
fn step<'m>(rollout: &Rollout<'m>, layer: &'m nn::Linear, x: &Tensor) -> Result<Tensor, ReplayError> {
    rollout.block("step", &[("x", x)], |_, x| layer.forward(&x[0]).tanh())
}

/// Runs a program that does what it may not, and without that, which gives plain autograd's results. Returns the first
/// run's error.
fn refused(
    name: &str,
    program: impl for<'m> Fn(&Rollout<'m>, &'m nn::Linear, &Run, bool) -> Result<(), ReplayError>,
) -> (Case<nn::Linear>, ReplayError) {
    check_differs(name, layer, |rollout, layer, run| program(rollout, layer, run, false));
    let case = Case::new(name, layer);
    let error = case.replay(|rollout, layer, run| program(rollout, layer, run, true)).unwrap_err();
    (case, error)
}

pub(crate) fn old_gradients_are_added_to(name: &str) {
    let build = |path: &nn::Path<'_>| {
        let idle = nn::linear(path / "idle", 6, 6, nn::LinearConfig::default());
        (layer(path), idle)
    };
    check_differs(name, build, |rollout, (layer, _), run| {
        run.output("y", &step(rollout, layer, &run.leaf("x"))?);
        Ok(())
    });
}

pub(crate) fn a_detached_output_does_not_require_grad(name: &str) {
    check_differs(name, layer, |rollout, layer, run| {
        let (constant, y) = rollout.block("pair", &[("x", &run.leaf("x"))], |_, x| {
            (layer.forward(&x[0]).tanh().detach(), layer.forward(&x[0]).sin())
        })?;
        run.output("constant", &constant);
        run.output("product", &(constant * y));
        Ok(())
    });
}

/// So there is nothing to differentiate.
pub(crate) fn where_nothing_is_trained_no_output_requires_grad(name: &str) {
    let case = Case::new(name, |path| {
        let layer = layer(path);
        for variable in layer.bs.iter().chain([&layer.ws]) {
            let _ = variable.set_requires_grad(false);
        }
        layer
    });
    let result = case.replay(|rollout, layer, run| {
        run.output("y", &step(rollout, layer, &run.input("x"))?);
        Ok(())
    });
    assert!(matches!(result, Err(ReplayError::LossWithoutGrad)));
    case.assert_equals("plain");
    case.assert_differs("reference");
}

pub(crate) fn parameters_may_be_used_outside_of_blocks_too(name: &str) {
    check_differs(name, layer, |rollout, layer, run| {
        run.output("y", &step(rollout, layer, &run.leaf("x"))?);
        run.output("weight", &layer.ws.square());
        Ok(())
    });
}

pub(crate) fn blocks_inside_blocks_share_the_sums(name: &str) {
    let build = |path: &nn::Path<'_>| {
        let outer = nn::linear(path / "outer", 6, 6, nn::LinearConfig::default());
        (outer, layer(path))
    };
    check_differs(name, build, |rollout, (outer, inner), run| {
        let mut state = run.leaf("x");
        for _ in 0..2 {
            state =
                rollout.block("outer", &[("x", &state)], |rollout, x| step(rollout, inner, &outer.forward(&x[0])))?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn a_region_without_autocast_is_differentiated_without_it(name: &str) {
    check_differs(name, layer, |rollout, layer, run| {
        let autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
        let y = rollout.block("step", &[("x", &run.leaf("x"))], |_, x| {
            let _disabled = AutocastGuard::disabled(Device::Cpu);
            layer.forward(&x[0]).tanh()
        })?;
        drop(autocast);
        run.output("y", &y);
        Ok(())
    });
}

pub(crate) fn a_tensor_with_a_history_must_be_an_input(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, captures| {
        let scale = run.leaf("scale").exp();
        let mut state = run.leaf("x");
        for _ in 0..2 {
            let captured = captures.then(|| scale.shallow_clone());
            let inputs = [("x", &state), ("scale", &scale)];
            state = rollout
                .block("step", &inputs, move |_, i| layer.forward(&i[0]).tanh() * captured.as_ref().unwrap_or(&i[1]))?;
        }
        run.output("state", &state);
        Ok(())
    });
    assert!(matches!(error, ReplayError::Captured { .. }), "{error}");
}

pub(crate) fn an_input_that_was_changed_is_an_error(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, changes| {
        let mut x = run.input("x");
        run.output("y", &step(rollout, layer, &x)?);
        if changes {
            let _ = x.g_add_scalar_(1.0);
        }
        Ok(())
    });
    assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "x"), "{error}");
}

pub(crate) fn a_parameter_that_was_changed_is_an_error(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, changes| {
        run.output("y", &step(rollout, layer, &run.leaf("x"))?);
        if changes {
            tch::no_grad(|| drop(layer.ws.shallow_clone().g_mul_scalar_(1.5)));
        }
        Ok(())
    });
    assert_variable_changed(&error);
}

pub(crate) fn a_parameter_that_was_frozen_is_an_error(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, changes| {
        run.output("y", &step(rollout, layer, &run.leaf("x"))?);
        if changes {
            let _ = layer.ws.set_requires_grad(false);
        }
        Ok(())
    });
    assert_variable_changed(&error);
}

fn assert_variable_changed(error: &ReplayError) {
    let of_weight = |variable: &str| variable == "linear.weight";
    assert!(matches!(error, ReplayError::VariableChanged { variable, .. } if of_weight(variable)), "{error}");
}

pub(crate) fn a_block_that_changes_its_input_is_an_error(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, changes| {
        let y = rollout.block("step", &[("x", &run.input("x"))], move |_, x| {
            let mut x = x[0].shallow_clone();
            layer.forward(&if changes { x.g_mul_scalar_(2.0) } else { x * 2.0 }).tanh()
        })?;
        run.output("y", &y);
        Ok(())
    });
    assert!(matches!(&error, ReplayError::InputWritten { input, .. } if input == "x"), "{error}");
}

/// They are put back as they were. Outside of the block they are updated once.
pub(crate) fn a_block_that_updates_statistics_is_an_error(name: &str) {
    let build = |path: &nn::Path<'_>| nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default());
    check_differs(name, build, |rollout, norm, run| {
        let normalised = norm.forward_t(&run.leaf("x"), true);
        run.output("y", &rollout.block("step", &[("x", &normalised)], |_, x| x[0].tanh())?);
        run.output("running_mean", &norm.running_mean);
        run.output("running_var", &norm.running_var);
        Ok(())
    });

    let case = Case::new(name, build);
    let before = case.model.running_mean.copy();
    let error = case.replay(|rollout, norm, run| {
        let y = rollout.block("step", &[("x", &run.leaf("x"))], |_, x| norm.forward_t(&x[0], true).tanh())?;
        run.output("y", &y);
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`step`") && error.contains("`norm.running_mean`"), "{error}");
    assert!(same_bits(&before, &case.model.running_mean));
}

pub(crate) fn a_replay_that_draws_other_numbers_is_an_error(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, draws| {
        let x = run.leaf("x");
        run.seed();
        let y = rollout.block("step", &[("x", &x)], move |_, x| {
            if draws && is_replaying() {
                drop(Tensor::rand([1], (Kind::Float, Device::Cpu)));
            }
            layer.forward(&x[0]).dropout(0.5, true)
        })?;
        run.output("y", &y);
        Ok(())
    });
    assert!(matches!(error, ReplayError::RngDiverged { .. }), "{error}");
}

/// That there are fewer outputs in the replay is impossible: their number is part of the block's type.
pub(crate) fn a_replay_that_detaches_an_output_is_an_error(name: &str) {
    let (_, error) = refused(name, |rollout, layer, run, detaches| {
        let (a, b) = rollout.block("pair", &[("x", &run.leaf("x"))], move |_, x| {
            let b = x[0].sin();
            (layer.forward(&x[0]).tanh(), if detaches && is_replaying() { b.detach() } else { b })
        })?;
        run.output("a", &a);
        run.output("b", &b);
        Ok(())
    });
    assert!(matches!(error, ReplayError::OutputMismatch { .. }), "{error}");
}

/// The weight has its old gradient and the bias none; the reference has cleared both.
fn assert_gradients_are_as_before<M>(case: &Case<M>) {
    let grad = |name: &str| case.vs.variables()[name].grad();
    assert!(same_bits(&case.run.given("old.linear.weight"), &grad("linear.weight")));
    assert!(!grad("linear.bias").defined());
    case.assert_differs("reference");
}

pub(crate) fn a_failed_replay_gives_old_gradients_back(name: &str) {
    let (case, error) = refused(name, |rollout, layer, run, fails| {
        let y = rollout.block("step", &[("x", &run.leaf("x"))], move |_, x| {
            if fails && is_replaying() { Err("no second time") } else { Ok(layer.forward(&x[0]).tanh()) }
        })?;
        run.output("y", &y);
        Ok(())
    });
    assert!(matches!(error, ReplayError::Block { pass: Pass::Replay, .. }), "{error}");
    assert_gradients_are_as_before(&case);
}

/// A layer behind a door, which may be closed by the time of the replay.
struct Guarded {
    layer: nn::Linear,
    closed: Cell<bool>,
}

struct Door<'m>(&'m Cell<bool>);

impl ReplayContext for Door<'_> {
    type Scope<'s>
        = ()
    where
        Self: 's;

    fn forward(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn replay(&self) -> Result<(), BoxError> {
        if self.0.get() { Err("the door is closed".into()) } else { Ok(()) }
    }
}

impl Guarded {
    fn door(&self) -> Door<'_> {
        Door(&self.closed)
    }

    #[replay_block(context = Self::door)]
    fn step(&self, x: &Tensor) -> Tensor {
        self.layer.forward(x).tanh()
    }

    fn run<'m>(&'m self, rollout: &Rollout<'m>, run: &Run) -> Result<(), ReplayError> {
        run.output("y", &self.step_replay(rollout, &run.leaf("x"))?);
        Ok(())
    }
}

pub(crate) fn a_context_that_fails_names_its_block_and_gives_old_gradients_back(name: &str) {
    let build = |path: &nn::Path<'_>| Guarded { layer: layer(path), closed: Cell::new(false) };
    check_differs(name, build, |rollout, model, run| model.run(rollout, run));
    let case = Case::new(name, build);
    let error = case.replay(|rollout, model, run| {
        model.run(rollout, run)?;
        model.closed.set(true);
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(matches!(&error, ReplayError::Context { block, pass: Pass::Replay, .. } if block == "step"), "{error}");
    assert_gradients_are_as_before(&case);
}

/// `Rollout::backward` consumes the rollout, and the loss knows no other way.
pub(crate) fn a_second_backward_pass_is_an_error(name: &str) {
    let case = Case::new(name, layer);
    let rollout = Rollout::new(&case.vs);
    let y = step(&rollout, &case.model, &case.run.leaf("x")).unwrap();
    case.run.output("y", &y);
    let loss = case.run.take_loss();
    rollout.backward(&loss).unwrap();
    loss.f_backward().unwrap_err();
    y.sum(Kind::Float).f_backward().unwrap_err();
    case.assert_equals("plain");
    case.assert_differs("reference");
}

pub(crate) fn a_second_derivative_is_taken_inside_a_block(name: &str) {
    check_differs(name, layer, |rollout, layer, run| {
        let x = run.leaf("x");
        let sum = step(rollout, layer, &x)?.sum(Kind::Float);
        Tensor::f_run_backward(&[sum], &[&x], true, true).expect_err("not from outside");

        let gradient = rollout.block("gradient", &[("x", &x)], |_, x| {
            let sum = layer.forward(&x[0]).tanh().sum(Kind::Float);
            Tensor::run_backward(&[sum], &[&x[0]], true, true).remove(0)
        })?;
        run.output("gradient", &gradient);
        Ok(())
    });
}
