//! The workloads: a model, its shapes, and one step of training without the optimizer.

use anyhow::Result;
use clap::ValueEnum;
use replay_runtime::{ReplayError, Rollout, RolloutReport};
use serde::{Deserialize, Serialize};
use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor};

use crate::models::{Adapted, Cnn, Context, Decoder, Mlp, Model};
use crate::modes::Mode;

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// A wide MLP: compute.
    Mlp,
    /// A causal transformer block.
    Decoder,
    /// 34 million parameters for 32 rows: gradients.
    Rollout,
    /// Sixteen numbers: the cost of a block.
    Tiny,
    /// A large input that all blocks share.
    Context,
    /// Convolutions: much graph, few parameters.
    Cnn,
    /// `mlp`, of which nine tenths are frozen.
    Frozen,
    /// `mlp` in blocks inside blocks.
    Nested,
}

/// How many blocks of `nested` are inside each outer one.
const INNER: i64 = 4;

impl Workload {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Decoder => "decoder",
            Self::Rollout => "rollout",
            Self::Tiny => "tiny",
            Self::Context => "context",
            Self::Cnn => "cnn",
            Self::Frozen => "frozen",
            Self::Nested => "nested",
        }
    }

    /// How many blocks a step has, unless told otherwise: about half a second of plain training on two cores.
    pub(crate) fn blocks(self, quick: bool) -> i64 {
        match (self, quick) {
            (Self::Tiny, false) => 300,
            (Self::Tiny, true) => 64,
            (Self::Cnn, false) => 6,
            (Self::Context, false) => 32,
            (Self::Rollout, false) => 4,
            (Self::Nested, true) => INNER,
            (_, true) => 2,
            _ => 8,
        }
    }

    /// The fewest blocks that it can have; it can have any multiple.
    pub(crate) fn least_blocks(self) -> i64 {
        if self == Self::Nested { INNER } else { 1 }
    }

    /// Whether the Python peers have it.
    pub(crate) fn has_peers(self) -> bool {
        matches!(self, Self::Mlp | Self::Decoder | Self::Rollout | Self::Tiny | Self::Context)
    }

    /// How deep blocks are nested.
    pub(crate) fn levels(self) -> u32 {
        if self == Self::Nested { 2 } else { 1 }
    }
}

/// A workload that is ready to run.
pub(crate) struct Setup {
    pub(crate) vs: VarStore,
    pub(crate) model: Box<dyn Model>,
    pub(crate) first: Tensor,
    pub(crate) cond: Tensor,
    pub(crate) blocks: i64,
    inner: Option<i64>,
    /// Serves to set gradients to `None` alone.
    optimizer: nn::Optimizer,
}

impl Setup {
    /// The same weights and inputs each time.
    pub(crate) fn new(workload: Workload, blocks: i64) -> Result<Self> {
        tch::manual_seed(0);
        let mut vs = VarStore::new(Device::Cpu);
        let root = vs.root();
        let model: Box<dyn Model> = match workload {
            Workload::Mlp | Workload::Nested => Box::new(Mlp::new(&root, 512, 2048, 1)),
            Workload::Decoder => Box::new(Decoder::new(&root, 256)),
            Workload::Rollout => Box::new(Mlp::new(&root, 1024, 4096, 4)),
            Workload::Tiny => Box::new(Mlp::new(&root, 16, 16, 1)),
            Workload::Context => Box::new(Context::new(&root)),
            Workload::Cnn => Box::new(Cnn::new(&root, 64)),
            Workload::Frozen => Box::new(Adapted::new(&mut vs, 512, 2048, 32)),
        };
        let (first, cond) = shapes(workload);
        let draw = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu)) / 10.0;
        let inner = (workload == Workload::Nested).then_some(INNER);
        anyhow::ensure!(blocks > 0 && blocks % inner.unwrap_or(1) == 0, "{workload:?} cannot have {blocks} blocks");
        let optimizer = nn::Sgd::default().build(&vs, 0.0)?;
        Ok(Self { first: draw(&first), cond: draw(&cond), vs, model, blocks, inner, optimizer })
    }

    /// Sets all gradients to `None`.
    pub(crate) fn forget_gradients(&mut self) {
        self.optimizer.zero_grad();
    }

    /// The forward of a step, up to the loss.
    pub(crate) fn forward<'m>(&'m self, how: &How<'_, 'm>) -> Result<Tensor, ReplayError> {
        let mut state = self.first.shallow_clone();
        let mut loss = None;
        for _ in 0..self.blocks / self.inner.unwrap_or(1) {
            state = scaled(&self.block(how, &state)?);
            let term = state.square().mean(Kind::Float);
            // Python's sum starts with 0.0 too.
            loss = Some(loss.map_or_else(|| &term + 0.0, |loss: Tensor| loss + &term));
        }
        Ok(loss.expect("at least one block"))
    }

    fn block<'m>(&'m self, how: &How<'_, 'm>, state: &Tensor) -> Result<Tensor, ReplayError> {
        let Some(inner) = self.inner else { return self.leaf(how, state, &self.cond) };
        match *how {
            How::Plain => self.chain(inner, &How::Plain, state, &self.cond),
            How::Replay(rollout, mode) => {
                let inputs = [("state", state), ("cond", &self.cond)];
                rollout.block_with(mode.block("outer"), &inputs, move |rollout, inputs| {
                    self.chain(inner, &How::Replay(rollout, mode), &inputs[0], &inputs[1])
                })
            }
        }
    }

    fn chain<'m>(&'m self, n: i64, how: &How<'_, 'm>, state: &Tensor, cond: &Tensor) -> Result<Tensor, ReplayError> {
        (0..n).try_fold(state.shallow_clone(), |state, _| Ok(scaled(&self.leaf(how, &state, cond)?)))
    }

    fn leaf<'m>(&'m self, how: &How<'_, 'm>, state: &Tensor, cond: &Tensor) -> Result<Tensor, ReplayError> {
        match *how {
            How::Plain => Ok(self.model.step(state, cond)),
            How::Replay(rollout, mode) => {
                let inputs = [("state", state), ("cond", cond)];
                rollout.block_with(mode.block("step"), &inputs, |_, inputs| self.model.step(&inputs[0], &inputs[1]))
            }
        }
    }

    /// Forward and backward of one step: the loss, and what the rollout reports.
    pub(crate) fn train(&self, mode: Mode, between: impl FnOnce()) -> Result<(f64, Option<RolloutReport>)> {
        if mode == Mode::Plain {
            let loss = self.forward(&How::Plain)?;
            between();
            loss.backward();
            return Ok((loss.double_value(&[]), None));
        }
        let rollout = mode.rollout(&self.vs);
        let loss = self.forward(&How::Replay(&rollout, mode))?;
        between();
        let report = rollout.backward(&loss)?;
        Ok((loss.double_value(&[]), Some(report)))
    }
}

/// How blocks are run.
pub(crate) enum How<'r, 'm> {
    /// As plain calls.
    Plain,
    /// As blocks of a rollout.
    Replay(&'r Rollout<'m>, Mode),
}

/// Keeps a long rollout from growing; the scale counts as a constant.
fn scaled(state: &Tensor) -> Tensor {
    state / (state.detach().abs().mean(Kind::Float) + 1.0)
}

/// The shapes of the first state and of the conditioning input.
fn shapes(workload: Workload) -> (Vec<i64>, Vec<i64>) {
    let same = |shape: &[i64]| (shape.to_vec(), shape.to_vec());
    match workload {
        Workload::Mlp | Workload::Frozen | Workload::Nested => same(&[256, 512]),
        Workload::Decoder => same(&[4, 256, 256]),
        Workload::Rollout => same(&[32, 1024]),
        Workload::Tiny => same(&[2, 16]),
        Workload::Context => (vec![16, 64], vec![2048, 1024]),
        Workload::Cnn => same(&[8, 64, 64, 64]),
    }
}
