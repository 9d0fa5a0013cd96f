//! Guarantee *versions*, for what is easily missed: a body that changes something in its replay only, one value of many, and
//! the same storage seen in another way.

use replay_runtime::{BlockOptions, ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, randn};
use tch::{Device, Kind, Tensor, nn};

/// A weight and a constant. Both are written where they are not needed for the gradient, so that LibTorch does not mind.
struct Model {
    weight: Tensor,
    offset: Tensor,
}

fn setup() -> Setup<Model> {
    let build = |path: &nn::Path<'_>| Model {
        weight: path.randn_standard("weight", &[6]),
        offset: path.zeros_no_train("offset", &[6]),
    };
    Setup::new(build)
}

/// Runs a block that acts in its replay, and returns what `backward` says.
fn write(buffers: bool, act: impl Fn(&Model, &[Tensor])) -> ReplayError {
    let setup = setup();
    let inputs = [randn(1, &[6], Kind::Float), randn(2, &[6], Kind::Float)];
    let rollout = Rollout::new(&setup.vs);
    let named = [("first", &inputs[0]), ("second", &inputs[1])];
    let y = rollout.block_with(BlockOptions::new("step").buffers(buffers), &named, |_, i| {
        let y = &i[0] + &i[1] + &setup.model.weight + &setup.model.offset;
        if is_replaying() {
            tch::no_grad(|| act(&setup.model, i));
        }
        y
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(!setup.model.weight.grad().defined(), "{error}");
    error
}

fn change(tensor: &Tensor) {
    let _ = tensor.shallow_clone().g_add_scalar_(1.0);
}

#[test]
fn a_replay_that_writes_a_parameter_is_an_error() {
    for buffers in [false, true] {
        let error = write(buffers, |model, _| change(&model.weight));
        assert!(matches!(&error, ReplayError::VariableWritten { variable, .. } if variable == "weight"), "{error}");
    }
}

/// The buffer comes first by name, and the block may write it.
#[test]
fn a_parameter_that_is_written_beside_a_buffer_is_an_error() {
    let error = write(true, |model, _| {
        change(&model.offset);
        change(&model.weight);
    });
    assert!(matches!(&error, ReplayError::VariableWritten { variable, .. } if variable == "weight"), "{error}");
}

#[test]
fn a_replay_that_writes_a_buffer_is_an_error() {
    let error = write(false, |model, _| change(&model.offset));
    assert!(matches!(&error, ReplayError::BufferWritten { variable, .. } if variable == "offset"), "{error}");
}

#[test]
fn a_replay_that_writes_an_input_is_an_error() {
    for (i, name) in ["first", "second"].into_iter().enumerate() {
        let error = write(false, |_, inputs| change(&inputs[i]));
        assert!(matches!(&error, ReplayError::InputWritten { input, .. } if input == name), "{error}");
    }
}

/// LibTorch's panic about a leaf that requires grad is told as in the forward.
#[test]
fn a_replay_that_writes_a_leaf_in_grad_mode_is_named() {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("step", &[("x", &randn(1, &[6], Kind::Float))], |_, i| {
        if is_replaying() {
            change(&setup.model.weight);
        }
        &i[0] * &setup.model.weight
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::InPlace { block } if block == "step"), "{error}");
    assert!(!setup.model.weight.grad().defined());
}

/// Of a large tensor a few values are looked at; a change of any other one gives it a new version.
#[test]
fn a_single_value_of_many_is_noticed() {
    let captured = randn(3, &[1000], Kind::Float).set_requires_grad(true);
    let setup = Setup::new(|path| path.randn_standard("weight", &[1000]));
    for tensor in [&setup.model, &captured] {
        let rollout = Rollout::new(&setup.vs);
        let x = randn(1, &[1000], Kind::Float);
        let y = rollout.block("step", &[("x", &x)], |_, i| &i[0] + &setup.model + &captured).unwrap();
        tch::no_grad(|| change(&tensor.get(3)));
        let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
        assert!(matches!(&error, ReplayError::VariableChanged { what: "values", .. }), "{error}");
    }
}

/// Behind its version only the values tell, and of a small tensor all are looked at.
#[test]
fn each_value_of_a_small_tensor_is_looked_at() {
    for at in 0..6 {
        let setup = setup();
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("step", &[("x", &randn(1, &[6], Kind::Float))], |_, i| &i[0] + &setup.model.weight);
        let _ = setup.model.weight.data().get(at).fill_(9.0);
        let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
        assert!(
            matches!(&error, ReplayError::VariableChanged { variable, .. } if variable == "weight"),
            "{at}: {error}"
        );
    }
}

/// Neither version nor storage nor values differ then.
#[test]
fn a_parameter_that_sees_its_storage_in_another_way_is_an_error() {
    let ways: [fn(&Tensor) -> Tensor; 4] =
        [|w| w.tr(), |w| w.view([4, 1]), |w| w.narrow(0, 0, 1), |w| w.view_dtype(Kind::BFloat16)];
    for (which, way) in ways.into_iter().enumerate() {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[2, 2]);
        w.shallow_clone().set_data(&Tensor::ones([2, 2], (Kind::Half, Device::Cpu)));
        let rollout = Rollout::new(&vs);
        let y = rollout.block("step", &[("x", &w.ones_like())], |_, i| &i[0] * w.sum(Kind::Half)).unwrap();
        w.shallow_clone().set_data(&way(&w.detach()));
        let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
        let ReplayError::VariableChanged { what, .. } = &error else { panic!("{which}: {error}") };
        assert_eq!(*what, "kind, device or shape", "{which}");
    }
}
