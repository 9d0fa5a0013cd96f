//! Guarantee *versions*: an input, parameter or buffer that was changed between forward and replay is an error that
//! names it; so is a block that changes one itself. No changed value is ever differentiated in silence.

use replay_runtime::{ReplayError, Rollout};
use replay_tests::{Oracle, Setup, assert_exact, randn, same_bits};
use tch::nn::{Module, ModuleT, OptimizerConfig};
use tch::{Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

/// A layer and a constant that is not trained.
fn with_buffer(path: &nn::Path<'_>) -> (nn::Linear, Tensor) {
    (linear(path), path.zeros_no_train("offset", &[6]))
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

/// Changes something between a block's forward and its replay, and returns what `backward` says.
fn change(act: impl FnOnce(&Setup<(nn::Linear, Tensor)>, &mut Tensor)) -> ReplayError {
    let setup = Setup::new(with_buffer);
    let mut input = x();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("first", &x()), ("state", &input)], |_, i| {
        let (linear, offset) = &setup.model;
        linear.forward(&(&i[0] + &i[1] + offset)).tanh()
    });
    let y = y.unwrap();
    act(&setup, &mut input);
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(setup.grads().values().all(Option::is_none), "{error:?}");
    assert!(error.to_string().contains("`step`") && error.to_string().lines().count() == 2, "{error}");
    error
}

#[track_caller]
fn assert_variable(error: &ReplayError, name: &str, difference: &str) {
    let ReplayError::VariableChanged { block, variable, what } = error else { panic!("{error:?}") };
    assert_eq!((block.as_str(), variable.as_str(), *what), ("step", name, difference));
    assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
}

#[test]
fn an_input_changed_in_place_is_an_error() {
    let error = change(|_, input| drop(input.g_add_scalar_(1.0)));
    assert!(matches!(&error, ReplayError::InputChanged { block, input } if block == "step" && input == "state"));
    assert!(error.to_string().contains("`state`"), "{error}");
}

#[test]
fn an_input_changed_through_a_view_is_an_error() {
    let error = change(|_, input| drop(input.view(-1).get(3).g_add_scalar_(1.0)));
    assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "state"), "{error:?}");
}

#[test]
fn an_input_changed_without_grad_is_an_error() {
    let error = change(|_, input| tch::no_grad(|| input.copy_(&x())));
    assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "state"), "{error:?}");
}

/// Replacing an input's values by others gives the tensor another storage; the block keeps the one it read.
#[test]
fn an_input_whose_data_were_replaced_keeps_its_gradient() {
    let run = |replace: bool| {
        let setup = Setup::new(linear);
        let mut input = x().set_requires_grad(true);
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("step", &[("state", &input)], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
        if replace {
            input.set_data(&randn(3, &[5, 6], Kind::Float));
        }
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        (setup.model.ws.grad(), input.grad())
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected.0, &found.0) && same_bits(&expected.1, &found.1));
}

/// Replaced data leave the version as it was, so the same tensor at the same version may hold other values.
#[test]
fn blocks_before_and_after_data_were_replaced_each_keep_theirs() {
    let run = |replace: bool| {
        let setup = Setup::new(linear);
        let (mut input, other) = (x(), randn(3, &[5, 6], Kind::Float));
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("before", &[("state", &input)], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
        if replace {
            input.set_data(&other);
        }
        let input = if replace { &input } else { &other };
        let z = rollout.block("after", &[("state", input)], |_, i| setup.model.forward(&i[0]).sin()).unwrap();
        rollout.backward(&(y + z).sum(Kind::Float)).unwrap();
        setup.model.ws.grad()
    };
    assert!(same_bits(&run(false), &run(true)));
}

#[test]
fn a_parameter_changed_in_place_is_an_error() {
    let error = change(|setup, _| tch::no_grad(|| drop(setup.model.0.ws.shallow_clone().g_add_scalar_(1.0))));
    assert_variable(&error, "weight", "values");
}

fn step_of(config: impl OptimizerConfig) -> ReplayError {
    let setup = Setup::new(linear);
    let mut optimizer = config.build(&setup.vs, 0.1).unwrap();
    setup.model.bs.as_ref().unwrap().sum(Kind::Float).backward();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("x", &x())], |_, i| setup.model.forward(&i[0])).unwrap();
    optimizer.step();
    rollout.backward(&y.sum(Kind::Float)).unwrap_err()
}

#[test]
fn parameters_changed_by_an_optimizer_are_an_error() {
    assert_variable(&step_of(nn::Adam::default()), "bias", "values");
    assert_variable(&step_of(nn::AdamW::default()), "bias", "values");
    assert_variable(&step_of(nn::RmsProp::default()), "bias", "values");
}

/// LibTorch's SGD writes through `data()`, which leaves version, storage and layout as they were.
#[test]
fn parameters_changed_by_plain_descent_are_an_error() {
    assert_variable(&step_of(nn::Sgd::default()), "bias", "values");
}

#[test]
fn a_parameter_whose_data_were_replaced_is_an_error() {
    let error = change(|setup, _| {
        let weight = &setup.model.0.ws;
        weight.shallow_clone().set_data(&weight.detach().copy());
    });
    assert_variable(&error, "weight", "storage");
}

#[test]
fn parameters_of_another_kind_are_an_error() {
    let error = change(|setup, _| setup.vs.root().double());
    assert_variable(&error, "bias", "kind, device or shape");
}

#[test]
fn a_parameter_frozen_by_hand_is_an_error() {
    let error = change(|setup, _| drop(setup.model.0.ws.set_requires_grad(false)));
    assert_variable(&error, "weight", "requires_grad");
}

#[test]
fn a_parameter_that_was_frozen_in_the_forward_is_an_error_once_it_trains() {
    let setup = Setup::new(linear);
    let _ = setup.model.ws.set_requires_grad(false);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("x", &x())], |_, i| setup.model.forward(&i[0])).unwrap();
    let _ = setup.model.ws.set_requires_grad(true);
    assert_variable(&rollout.backward(&y.sum(Kind::Float)).unwrap_err(), "weight", "requires_grad");
}

#[test]
fn a_buffer_changed_in_place_is_an_error() {
    let error = change(|setup, _| drop(setup.model.1.shallow_clone().g_add_scalar_(1.0)));
    assert_variable(&error, "offset", "values");
}

#[test]
fn a_buffer_whose_data_were_replaced_is_an_error() {
    let error = change(|setup, _| setup.model.1.shallow_clone().set_data(&setup.model.1.ones_like()));
    assert_variable(&error, "offset", "storage");
}

/// LibTorch's normalisation kernel writes running statistics without a new version.
#[test]
fn a_buffer_changed_by_a_normalisation_kernel_is_an_error() {
    let setup = Setup::new(|path| nn::batch_norm1d(path, 6, nn::BatchNormConfig::default()));
    let norm = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("x", &x())], |_, i| norm.forward_t(&i[0], false)).unwrap();
    let _ = norm.forward_t(&x(), true);
    assert_variable(&rollout.backward(&y.sum(Kind::Float)).unwrap_err(), "running_mean", "values");
}

#[test]
fn a_captured_leaf_that_changed_is_an_error() {
    let setup = Setup::new(linear);
    let scale = randn(3, &[6], Kind::Float).set_requires_grad(true);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("x", &x())], |_, i| setup.model.forward(&i[0]) * &scale).unwrap();
    tch::no_grad(|| drop(scale.shallow_clone().g_add_scalar_(1.0)));
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { what: "values", .. }), "{error:?}");
    assert!(error.to_string().contains("[6]"), "{error}");
}

/// The earliest replay is the last block's: what changed before it ran is no change to it.
#[test]
fn only_blocks_before_the_change_are_in_error() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let h = rollout.block("before", &[("x", &x())], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
    tch::no_grad(|| drop(setup.model.ws.shallow_clone().g_mul_scalar_(0.5)));
    let y = rollout.block("after", &[("h", &h)], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { block, .. } if block == "before"), "{error:?}");

    let rollout = Rollout::new(&setup.vs);
    let h = rollout.block("unneeded", &[("x", &x())], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
    tch::no_grad(|| drop(setup.model.ws.shallow_clone().g_mul_scalar_(0.5)));
    let y = rollout.block("after", &[("h", &h.detach())], |_, i| setup.model.forward(&i[0]).tanh()).unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
}

#[test]
fn a_change_to_an_output_or_to_another_tensor_is_none_of_a_blocks_business() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let input = x();
            let mut bystander = x();
            let mut y = how.block("step", &[("x", &input)], |i| model.forward(&i[0]));
            let _ = bystander.g_add_scalar_(1.0);
            let _ = y.g_mul_(&bystander);
            y.sum(Kind::Float)
        },
    );
}

/// A block that changes something in its own forward.
fn write(act: impl Fn(&(nn::Linear, Tensor), &[Tensor])) -> ReplayError {
    let setup = Setup::new(with_buffer);
    let input = x();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("first", &x()), ("state", &input)], |_, i| {
        let y = setup.model.0.forward(&(&i[0] + &i[1]));
        act(&setup.model, i);
        y
    });
    y.unwrap_err()
}

#[test]
fn a_block_that_writes_its_input_is_an_error() {
    let error = write(|_, i| drop(i[1].shallow_clone().g_add_scalar_(1.0)));
    assert!(matches!(&error, ReplayError::InputWritten { block, input } if block == "step" && input == "state"));
    assert!(error.to_string().contains("`state.copy()`"), "{error}");
}

/// LibTorch refuses to change a leaf that requires grad, and its panic does not say where.
#[test]
fn a_block_that_writes_an_input_or_a_variable_that_requires_grad_is_named() {
    let write = |act: &dyn Fn(&nn::Linear, &Tensor) -> Tensor| {
        let setup = Setup::new(linear);
        let input = x().set_requires_grad(true).sin();
        let before = input.copy();
        let rollout = Rollout::new(&setup.vs);
        let error = rollout.block("step", &[("x", &input)], |_, i| act(&setup.model, &i[0])).unwrap_err();
        assert!(same_bits(&before, &input), "nothing was written");
        let y = rollout.block("next", &[("x", &input)], |_, i| setup.model.forward(&i[0])).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        error
    };
    let errors = [
        write(&|model, i| model.forward(&i.shallow_clone().g_mul_scalar_(2.0))),
        write(&|model, i| model.forward(&i.narrow(0, 0, 2).g_mul_scalar_(2.0))),
        write(&|model, i| model.forward(i) + model.ws.shallow_clone().g_mul_scalar_(2.0).sum(Kind::Float)),
    ];
    for error in errors {
        assert!(matches!(&error, ReplayError::InPlace { block } if block == "step"), "{error:?}");
        assert!(error.to_string().contains("copy()"), "{error}");
    }
    let fallible = |i: &[Tensor]| i[0].shallow_clone().f_mul_(&i[0].detach());
    let setup = Setup::new(linear);
    let input = x().set_requires_grad(true);
    let error = Rollout::new(&setup.vs).block("step", &[("x", &input)], |_, i| fallible(i)).unwrap_err();
    assert!(error.to_string().contains("`step`") && error.to_string().contains("in-place"), "{error}");
}

#[test]
fn a_block_that_writes_a_view_of_its_input_is_an_error() {
    let error = write(|_, i| drop(i[0].narrow(0, 1, 1).zero_()));
    assert!(matches!(&error, ReplayError::InputWritten { input, .. } if input == "first"), "{error:?}");
}

#[test]
fn a_block_that_writes_a_parameter_is_an_error() {
    let error = write(|(linear, _), _| tch::no_grad(|| drop(linear.ws.shallow_clone().g_mul_scalar_(0.5))));
    assert!(
        matches!(&error, ReplayError::VariableWritten { block, variable, .. } if block == "step" && variable == "weight")
    );
    assert!(error.to_string().contains("`weight`"), "{error}");
}

#[test]
fn a_block_that_replaces_a_parameters_data_is_an_error() {
    let error = write(|(linear, _), _| linear.ws.shallow_clone().set_data(&linear.ws.detach().copy()));
    assert!(matches!(&error, ReplayError::VariableWritten { variable, .. } if variable == "weight"), "{error:?}");
}

#[test]
fn a_block_that_writes_a_buffer_is_an_error() {
    let error = write(|(_, offset), _| drop(offset.shallow_clone().g_add_scalar_(1.0)));
    assert!(matches!(&error, ReplayError::BufferWritten { variable, .. } if variable == "offset"), "{error:?}");
}

#[test]
fn a_normalisation_layer_in_train_mode_is_an_error_and_its_statistics_are_put_back() {
    let setup = Setup::new(|path| nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default()));
    let norm = &setup.model;
    let before = (norm.running_mean.copy(), norm.running_var.copy());
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("step", &[("x", &x())], |_, i| norm.forward_t(&i[0], true)).unwrap_err();
    assert!(
        matches!(&error, ReplayError::BufferWritten { block, variable } if block == "step" && variable == "norm.running_mean")
    );
    let text = error.to_string();
    assert!(text.contains("replay_block(buffers)") && text.contains("train = false"), "{text}");
    assert!(same_bits(&before.0, &norm.running_mean) && same_bits(&before.1, &norm.running_var));

    let y = rollout.block("step", &[("x", &x())], |_, i| norm.forward_t(&i[0], false)).unwrap();
    rollout.backward(&y.square().sum(Kind::Float)).unwrap();
    assert!(norm.ws.as_ref().unwrap().grad().defined());
}

/// Statistics that are passed as inputs are written by the kernel without a new version.
#[test]
fn statistics_passed_as_inputs_are_inputs_that_the_block_writes() {
    let setup = Setup::new(linear);
    let options = (Kind::Float, tch::Device::Cpu);
    let (mean, var) = (Tensor::zeros([6], options), Tensor::ones([6], options));
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("norm", &[("x", &x()), ("mean", &mean), ("var", &var)], |_, i| {
        let h = setup.model.forward(&i[0]);
        h.batch_norm(None::<&Tensor>, None::<&Tensor>, Some(&i[1]), Some(&i[2]), true, 0.1, 1e-5, false)
    });
    assert!(matches!(&error, Err(ReplayError::InputWritten { input, .. }) if input == "mean"), "{error:?}");
}

#[test]
fn an_input_changed_behind_its_version_is_an_error() {
    let setup = Setup::new(linear);
    let x = x();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("x", &x)], |_, i| setup.model.forward(&i[0])).unwrap();
    let _ = x.data().fill_(9.0);
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::InputChanged { input, .. } if input == "x"), "{error}");
}

#[test]
fn a_block_that_switches_its_inputs_gradient_off_is_an_error() {
    let setup = Setup::new(linear);
    let x = x().set_requires_grad(true).sin();
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("cuts", &[("x", &x)], |_, i| {
        let cut = i[0].set_requires_grad(false);
        setup.model.forward(&cut)
    });
    assert!(matches!(error, Err(ReplayError::InputWritten { .. })), "{error:?}");
}

#[test]
fn a_block_that_makes_variables_is_an_error() {
    let setup = Setup::new(linear);
    let vs = &setup.vs;
    let rollout = Rollout::new(vs);
    let error = rollout.block("grows", &[("x", &x())], move |_, i| {
        nn::linear(vs.root() / "more", 6, 6, nn::LinearConfig::default()).forward(&i[0])
    });
    assert!(matches!(error, Err(ReplayError::VariableAdded { .. })), "{error:?}");

    let other = nn::VarStore::new(tch::Device::Cpu);
    let root = other.root();
    let rollout = Rollout::builder(vs).store(&other).build();
    let error = rollout.block("grows", &[("x", &x())], |_, i| &i[0] * root.ones("late", &[6]));
    assert!(matches!(error, Err(ReplayError::VariableAdded { .. })), "{error:?}");
}

/// Putting a buffer back changes nothing for the blocks before, so a caller that goes on without the failed block may.
#[test]
fn a_buffer_that_was_put_back_is_no_change_for_earlier_blocks() {
    let setup = Setup::new(|path| {
        (linear(&(path / "linear")), nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default()))
    });
    let (linear, norm) = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("first", &[("x", &x())], |_, i| linear.forward(&i[0])).unwrap();
    let error = rollout.block("norm", &[("y", &y)], |_, i| norm.forward_t(&i[0], true)).unwrap_err();
    assert!(matches!(error, ReplayError::BufferWritten { .. }), "{error}");
    let z = rollout.block("norm", &[("y", &y)], |_, i| norm.forward_t(&i[0], false)).unwrap();
    rollout.backward(&z.square().sum(Kind::Float)).unwrap();
}
