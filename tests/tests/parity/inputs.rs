//! What goes into a block and what comes out of it. The counterpart of `tests/parity/inputs.py`.

use replay_runtime::replay_block;
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

use crate::run::check;

fn layer(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path / "linear", 6, 6, nn::LinearConfig::default())
}

/// One layer in several forms.
struct Layer(nn::Linear);

impl Layer {
    fn new(path: &nn::Path<'_>) -> Self {
        Self(layer(path))
    }

    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        self.0.forward(x).tanh()
    }

    #[replay_block]
    fn three(&self, x: &Tensor, y: Tensor, z: &Tensor) -> Tensor {
        self.0.forward(&(x * y)).tanh() * z.exp()
    }

    #[replay_block]
    fn select(&self, rows: &Tensor, x: &Tensor, keep: &Tensor) -> Tensor {
        self.0.forward(x).index_select(0, rows).tanh() * keep
    }

    #[replay_block]
    fn both(&self, a: &Tensor, b: &Tensor) -> Tensor {
        self.0.forward(a).tanh() * b.cos()
    }

    #[replay_block]
    fn kinds(&self, x: &Tensor) -> (Tensor, Tensor, Tensor) {
        let hidden = self.0.forward(x).tanh();
        (hidden.argmax(1, false), hidden.gt(0.0), hidden)
    }

    #[replay_block]
    fn views(&self, x: &Tensor) -> (Tensor, Tensor, Tensor, Tensor) {
        let mut halves = self.0.forward(x).chunk(2, 1);
        (halves.remove(0), halves.remove(0), x.shallow_clone(), x.tr())
    }
}

pub(crate) fn some_inputs_without_grad(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let (x, y, z) = (run.leaf("x"), run.input("y"), run.leaf("z"));
        run.output("y", &model.three_replay(rollout, &x, y, &z)?);
        Ok(())
    });
}

pub(crate) fn parameters_alone_get_gradients(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let mut state = run.input("x");
        for _ in 0..3 {
            state = model.step_replay(rollout, &state)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

/// Marks a variable as not to be trained.
fn freeze(variable: &Tensor) {
    let _ = variable.set_requires_grad(false);
}

pub(crate) fn some_parameters_are_frozen(name: &str) {
    let build = |path: &nn::Path<'_>| {
        let of = |name: &str| nn::linear(path / name, 6, 6, nn::LinearConfig::default());
        let (first, second) = (of("first"), of("second"));
        freeze(&first.ws);
        first.bs.iter().chain(&second.bs).for_each(freeze);
        (first, second)
    };
    check(name, build, |rollout, (first, second), run| {
        let mut state = run.leaf("x");
        for _ in 0..2 {
            state = rollout.block("pair", &[("x", &state)], |_, x| second.forward(&first.forward(&x[0]).tanh()))?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn all_parameters_are_frozen(name: &str) {
    let build = |path: &nn::Path<'_>| {
        let layer = Layer::new(path);
        freeze(&layer.0.ws);
        layer.0.bs.iter().for_each(freeze);
        layer
    };
    check(name, build, |rollout, model, run| {
        let state = model.step_replay(rollout, &run.leaf("x"))?;
        run.output("state", &model.step_replay(rollout, &state)?);
        Ok(())
    });
}

pub(crate) fn integer_and_boolean_inputs(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let (rows, x, keep) = (run.input("rows"), run.leaf("x"), run.input("keep"));
        run.output("y", &model.select_replay(rollout, &rows, &x, &keep)?);
        Ok(())
    });
}

pub(crate) fn the_same_tensor_as_two_inputs(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let x = run.leaf("x");
        run.output("y", &model.both_replay(rollout, &x, &x)?);
        Ok(())
    });
}

pub(crate) fn an_expanded_input(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let wide = run.leaf("row").expand([5, 6], false);
        run.output("y", &model.step_replay(rollout, &wide)?);
        Ok(())
    });
}

pub(crate) fn transposed_and_strided_inputs(name: &str) {
    check(name, layer, |rollout, layer, run| {
        let (x, y) = (run.leaf("x").tr(), run.leaf("y").slice(0, None, None, 2));
        let sum = rollout.block("step", &[("x", &x), ("y", &y)], |_, i| layer.forward(&i[0]).tanh() + &i[1])?;
        run.output("sum", &sum);
        Ok(())
    });
}

pub(crate) fn scalar_and_empty_inputs(name: &str) {
    check(name, layer, |rollout, layer, run| {
        let (x, scale, none) = (run.leaf("x"), run.leaf("scale"), run.leaf("none"));
        let y = rollout.block("step", &[("x", &x), ("scale", &scale), ("none", &none)], |_, i| {
            layer.forward(&Tensor::cat(&[&i[0], &i[2]], 0)) * &i[1]
        })?;
        run.output("y", &y);
        Ok(())
    });
}

pub(crate) fn inputs_of_two_kinds(name: &str) {
    check(name, layer, |rollout, layer, run| {
        let inputs = [("x", &run.leaf("x")), ("y", &run.leaf("y"))];
        let y = rollout.block("step", &inputs, |_, i| (layer.forward(&i[0]).to_kind(Kind::Double) * &i[1]).sin())?;
        run.output("y", &y);
        Ok(())
    });
}

pub(crate) fn a_trained_tensor_that_blocks_capture(name: &str) {
    check(name, layer, |rollout, layer, run| {
        let (scale, mut state) = (run.leaf("scale"), run.leaf("x"));
        for _ in 0..2 {
            let scale = scale.shallow_clone();
            state = rollout.block("step", &[("x", &state)], move |_, x| layer.forward(&x[0]).tanh() * &scale)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn integer_and_boolean_outputs(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let (index, mask, hidden) = model.kinds_replay(rollout, &run.leaf("x"))?;
        run.output("index", &index);
        run.output("mask", &mask);
        run.output("hidden", &hidden);
        Ok(())
    });
}

pub(crate) fn views_and_inputs_as_outputs(name: &str) {
    check(name, Layer::new, |rollout, model, run| {
        let (left, right, same, turned) = model.views_replay(rollout, &run.leaf("x"))?;
        run.output("left", &left);
        run.output("right", &right);
        run.output("same", &same);
        run.output("turned", &turned);
        Ok(())
    });
}

pub(crate) fn operations_in_place_inside_a_block(name: &str) {
    check(name, layer, |rollout, layer, run| {
        let inputs = [("x", &run.leaf("x"))];
        let y = rollout.block("step", &inputs, |_, x| layer.forward(&x[0]).g_mul_scalar_(2.0).tanh_())?;
        run.output("y", &y);
        Ok(())
    });
}

pub(crate) fn an_output_changed_in_place_by_the_caller(name: &str) {
    check(name, layer, |rollout, layer, run| {
        let mut y = rollout.block("step", &[("x", &run.leaf("x"))], |_, x| layer.forward(&x[0]).sin())?;
        run.output("y", &y.g_mul_scalar_(3.0).g_add_scalar_(1.0));
        Ok(())
    });
}
