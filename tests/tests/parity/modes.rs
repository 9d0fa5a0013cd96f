//! What a replay must find as its forward did. The counterpart of `tests/parity/modes.py`.

use std::cell::Cell;

use replay_runtime::{BoxError, ReplayContext, ReplayError, Rollout, replay_block};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::run::check;

/// One linear layer, and a scale that changes from block to block.
struct Step {
    linear: nn::Linear,
    scale: Cell<f64>,
}

impl Step {
    fn new(path: &nn::Path<'_>) -> Self {
        let linear = nn::linear(path / "linear", 6, 6, nn::LinearConfig::default());
        Self { linear, scale: Cell::new(1.0) }
    }

    fn snapshot(&self) -> Snapshot<'_> {
        Snapshot(&self.scale, self.scale.get())
    }

    #[replay_block]
    fn step(&self, state: &Tensor) -> Tensor {
        self.linear.forward(state).tanh()
    }

    #[replay_block(context = Self::snapshot)]
    fn scaled(&self, state: &Tensor) -> Tensor {
        self.linear.forward(state).tanh() * self.scale.get()
    }

    #[replay_block]
    fn dropped(&self, state: &Tensor) -> Tensor {
        self.linear.forward(state).dropout(0.4, true).tanh()
    }

    #[replay_block]
    fn dropped_twice<'m>(&'m self, rollout: &Rollout<'m>, state: &Tensor) -> Result<Tensor, ReplayError> {
        self.dropped_replay(rollout, &state.dropout(0.2, true))
    }
}

/// The scale as it was at the forward.
struct Snapshot<'m>(&'m Cell<f64>, f64);

impl ReplayContext for Snapshot<'_> {
    type Scope<'s>
        = Option<Put<'s>>
    where
        Self: 's;

    fn forward(&self) -> Result<Option<Put<'_>>, BoxError> {
        Ok(None)
    }

    fn replay(&self) -> Result<Option<Put<'_>>, BoxError> {
        Ok(Some(Put(self.0, self.0.replace(self.1))))
    }
}

struct Put<'s>(&'s Cell<f64>, f64);

impl Drop for Put<'_> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

pub(crate) fn a_context_that_restores_what_blocks_read(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        for scale in [1.0, 2.0, -0.5] {
            model.scale.set(scale);
            state = model.scaled_replay(rollout, &state)?;
        }
        model.scale.set(17.0);
        run.output("state", &state);
        Ok(())
    });
}

fn dropout(name: &str, blocks: usize) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        run.seed();
        for _ in 0..blocks {
            let body = |_: &Rollout<'_>, x: &[Tensor]| model.linear.forward(&x[0]).tanh().dropout(0.4, true);
            state = rollout.block("drop", &[("state", &state)], body)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn dropout_in_one_block(name: &str) {
    dropout(name, 1);
}

pub(crate) fn dropout_in_five_blocks(name: &str) {
    dropout(name, 5);
}

pub(crate) fn noise_of_several_kinds(name: &str) {
    let (real, integer) = ((Kind::Double, Device::Cpu), (Kind::Int64, Device::Cpu));
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        run.seed();
        for _ in 0..3 {
            state = rollout.block("noisy", &[("state", &state)], move |_, x| {
                let state = model.linear.forward(&x[0]).tanh() * Tensor::randn([1], real);
                &state * Tensor::rand([6], real) + Tensor::randint(3, [5, 1], integer) * state.sin()
            })?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn numbers_drawn_between_blocks(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        run.seed();
        for _ in 0..3 {
            state = model.dropped_replay(rollout, &state)? * Tensor::rand([6], (Kind::Float, Device::Cpu));
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn blocks_with_dropout_inside_blocks(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        run.seed();
        for _ in 0..2 {
            state = model.dropped_twice_replay(rollout, &state)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn autocast_around_three_blocks(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let mut state = run.leaf("state");
        let autocast = run.autocast();
        for _ in 0..3 {
            state = model.step_replay(rollout, &state)?;
        }
        drop(autocast);
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn autocast_around_one_block_of_three(name: &str) {
    check(name, Step::new, |rollout, model, run| {
        let state = model.step_replay(rollout, &run.leaf("state"))?;
        let state = {
            let _autocast = run.autocast();
            model.step_replay(rollout, &state)?
        };
        run.output("middle", &state);
        run.output("state", &model.step_replay(rollout, &state.to_kind(Kind::Float))?);
        Ok(())
    });
}
