//! How many blocks, what they hand on, and what runs between them. The counterpart of `tests/parity/rollouts.py`.

use replay_runtime::{ReplayError, Rollout, replay_block};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

use crate::run::{Case, check};

/// A layer of its own name.
fn linear(path: &nn::Path<'_>, name: &str, from: i64, to: i64) -> nn::Linear {
    nn::linear(path / name, from, to, nn::LinearConfig::default())
}

fn one_layer(path: &nn::Path<'_>) -> nn::Linear {
    linear(path, "linear", 6, 6)
}

/// The closure form.
fn chain(name: &str, blocks: usize) {
    check(name, one_layer, |rollout, layer, run| {
        let mut state = run.leaf("state");
        for i in 0..blocks {
            state = rollout.block("step", &[("state", &state)], |_, x| layer.forward(&x[0]).tanh())?;
            run.output(&format!("state{i}"), &state);
        }
        Ok(())
    });
}

#[derive(Clone, Copy)]
enum Activation {
    Tanh,
    Sigmoid,
}

struct Step(nn::Linear);

impl Step {
    fn new(path: &nn::Path<'_>) -> Self {
        Self(one_layer(path))
    }

    #[replay_block]
    fn step(&self, state: &Tensor) -> Tensor {
        self.0.forward(state).tanh()
    }

    #[replay_block]
    fn shaped(&self, state: &Tensor, #[meta] scale: f64, #[meta] power: i64, #[meta] activation: Activation) -> Tensor {
        let state = self.0.forward(state) * scale;
        let state = match activation {
            Activation::Tanh => state.tanh(),
            Activation::Sigmoid => state.sigmoid(),
        };
        state.pow_tensor_scalar(power)
    }
}

/// The attribute's form.
fn chain_of_steps(name: &str, blocks: usize) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        for i in 0..blocks {
            state = model.step_replay(rollout, &state)?;
            run.output(&format!("state{i}"), &state);
        }
        Ok(())
    });
}

pub(crate) fn one_block(name: &str) {
    chain(name, 1);
}

pub(crate) fn a_chain_of_two_blocks(name: &str) {
    chain(name, 2);
}

pub(crate) fn a_chain_of_three_blocks_in_f64(name: &str) {
    chain(name, 3);
}

pub(crate) fn a_chain_of_four_blocks(name: &str) {
    chain_of_steps(name, 4);
}

pub(crate) fn a_chain_of_five_blocks(name: &str) {
    chain(name, 5);
}

pub(crate) fn a_chain_of_five_blocks_in_f64(name: &str) {
    chain_of_steps(name, 5);
}

struct World {
    first: nn::Linear,
    second: nn::Linear,
}

impl World {
    fn new(path: &nn::Path<'_>, rewards: i64) -> Self {
        Self { first: linear(path, "first", 6, 6), second: linear(path, "second", 6, rewards) }
    }

    #[replay_block]
    fn step(&self, state: &Tensor, action: &Tensor) -> (Tensor, Tensor) {
        let hidden = self.first.forward(state) + action;
        (hidden.tanh(), self.second.forward(&hidden).sigmoid())
    }

    #[replay_block]
    fn triple(&self, x: &Tensor) -> (Tensor, Tensor, Tensor) {
        let hidden = self.first.forward(x);
        (hidden.tanh(), self.second.forward(&hidden), hidden.exp())
    }
}

pub(crate) fn two_outputs(name: &str) {
    let build = |path: &nn::Path<'_>| World::new(path, 2);
    check(name, build, |rollout, world, run| {
        let (mut state, action) = (run.leaf("state"), run.leaf("action"));
        for i in 0..2 {
            let (next, reward) = world.step_replay(rollout, &state, &action)?;
            run.output(&format!("reward{i}"), &reward);
            state = next;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn one_output_of_three_is_unused(name: &str) {
    let build = |path: &nn::Path<'_>| World::new(path, 6);
    check(name, build, |rollout, world, run| {
        let (a, b, c) = world.triple_replay(rollout, &run.leaf("x"))?;
        run.output("a", &a);
        run.output("b", &b);
        run.output("c", &c);
        Ok(())
    });
}

pub(crate) fn an_output_read_by_two_blocks(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let trunk = model.step_replay(rollout, &run.leaf("state"))?;
        run.output("left", &model.step_replay(rollout, &trunk)?);
        run.output("right", &model.step_replay(rollout, &trunk.cos())?);
        run.output("trunk", &trunk);
        Ok(())
    });
}

pub(crate) fn metadata_that_differs_from_block_to_block(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        use Activation::{Sigmoid, Tanh};
        let mut state = run.leaf("state");
        for (scale, power, activation) in [(0.5, 1, Tanh), (1.25, 2, Sigmoid), (-0.75, 3, Tanh)] {
            state = model.shaped_replay(rollout, &state, scale, power, activation)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

struct Nested {
    inner: Step,
    outer: nn::Linear,
}

impl Nested {
    fn new(path: &nn::Path<'_>) -> Self {
        Self { inner: Step::new(path), outer: linear(path, "outer", 6, 6) }
    }

    #[replay_block]
    fn step<'m>(&'m self, rollout: &Rollout<'m>, state: &Tensor) -> Result<Tensor, ReplayError> {
        let state = self.inner.step_replay(rollout, &self.outer.forward(state))?;
        Ok(self.inner.step_replay(rollout, &state)?.sin())
    }
}

pub(crate) fn blocks_inside_blocks(name: &str) {
    check(name, Nested::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        for _ in 0..2 {
            state = model.step_replay(rollout, &state)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

/// Each pass has a rollout of its own, and adds to `.grad`.
pub(crate) fn gradients_of_three_backward_passes(name: &str) {
    let case = Case::new(name, Step::new);
    let state = case.run.leaf("state");
    for i in 0..3 {
        case.replay(|rollout, model, run| {
            let once = model.step_replay(rollout, &(&state * (i + 1)))?;
            run.output(&format!("state{i}"), &model.step_replay(rollout, &once)?);
            Ok(())
        })
        .unwrap();
    }
    case.assert_equals("reference");
}

pub(crate) fn plain_code_between_blocks(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state").sin();
        for _ in 0..3 {
            state = model.step_replay(rollout, &state)?;
            state = &state / (state.detach().abs().mean(Kind::Float) + 1.0);
        }
        run.output("state", &state.exp());
        Ok(())
    });
}

pub(crate) fn a_state_detached_between_blocks(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        for i in 0..3 {
            state = model.step_replay(rollout, &state.detach())?;
            run.output(&format!("state{i}"), &state);
        }
        Ok(())
    });
}

struct Autoencoder {
    encode: nn::Linear,
    step: nn::Linear,
    decode: nn::Linear,
}

pub(crate) fn three_models_in_one_rollout(name: &str) {
    let build = |path: &nn::Path<'_>| Autoencoder {
        encode: linear(path, "encode", 8, 6),
        step: linear(path, "step", 6, 6),
        decode: linear(path, "decode", 6, 8),
    };
    check(name, build, |rollout, model, run| {
        let image = [("image", &run.leaf("image"))];
        let mut state = rollout.block("encode", &image, |_, x| model.encode.forward(&x[0]).tanh())?;
        for i in 0..2 {
            state = rollout.block("step", &[("state", &state)], |_, x| &x[0] + model.step.forward(&x[0]).tanh())?;
            let image = rollout.block("decode", &[("state", &state)], |_, x| model.decode.forward(&x[0]))?;
            run.output(&format!("image{i}"), &image);
        }
        Ok(())
    });
}
