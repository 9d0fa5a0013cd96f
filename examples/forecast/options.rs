//! The command line.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Parser;
use tch::Device;

use crate::evaluate::LEADS;
use crate::train::Arm;

/// Where the rollout runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Place {
    /// The processor.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}

/// Trains an autoregressive forecaster by backpropagating through rollouts of many years, with replay blocks, and
/// compares one such step with plain autograd: same gradients, a fraction of the memory.
#[derive(Debug, Clone, Parser)]
#[command(name = "forecast")]
pub(crate) struct Options {
    /// A monthly series to learn from: a table of YEAR and twelve months, or one value a row from a January on.
    /// Without it: sea-surface temperatures of the eastern Pacific, 1950-2010, that come with the example.
    #[arg(long, value_name = "PATH")]
    pub(crate) csv: Option<PathBuf>,
    /// The column to read, where the file has one value a row and a header.
    #[arg(long, value_name = "NAME", requires = "csv")]
    pub(crate) column: Option<String>,
    /// The first held-out year: 1999 unless told otherwise; the last fifth where the file names no years.
    #[arg(long, value_name = "YEAR")]
    pub(crate) test_from: Option<i64>,
    /// Training steps.
    #[arg(long, default_value_t = 100)]
    pub(crate) steps: usize,
    /// Months in a rollout, each one replay block.
    #[arg(long, default_value_t = 72)]
    pub(crate) months: usize,
    /// Months of a rollout that read observed values; from then on the model reads its own forecasts.
    #[arg(long, default_value_t = 48)]
    pub(crate) warm_up: usize,
    /// Windows of the training years in one training step.
    #[arg(long, default_value_t = 16)]
    pub(crate) windows: usize,
    /// Ensemble members that forecast each window, every one with its own noise.
    #[arg(long, default_value_t = 48)]
    pub(crate) ensemble: usize,
    /// Width of the recurrent state.
    #[arg(long, default_value_t = 160)]
    pub(crate) width: i64,
    /// Seed of weights, windows and noise.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: i64,
    /// Learning rate at its height.
    #[arg(long, default_value_t = 3e-3)]
    pub(crate) lr: f64,
    /// Weight decay of the optimizer.
    #[arg(long, default_value_t = 1e-2)]
    pub(crate) weight_decay: f64,
    /// How strongly forecasts are pulled towards the month means: a guard against years unlike the training years.
    #[arg(long, default_value_t = 0.15)]
    pub(crate) shrinkage: f64,
    /// Threads that train; the comparison always uses one, where sums have one order.
    #[arg(long, default_value_t = 1)]
    pub(crate) threads: i32,
    /// Where to run.
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) device: Place,
    /// Folder for the two pictures and the trained weights.
    #[arg(long, value_name = "DIR", default_value = "out/forecast")]
    pub(crate) out: PathBuf,
    /// End standard output with one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Be one arm of the comparison, told what to do on standard input.
    #[arg(long, value_enum, hide = true)]
    pub(crate) worker: Option<Arm>,
}

impl Options {
    /// Refuses numbers that no rollout can have.
    pub(crate) fn validate(&self) -> Result<()> {
        ensure!(self.warm_up >= 1 && self.warm_up < self.months, "--warm-up must be from 1 to --months less one");
        ensure!(self.months > LEADS, "--months must be above {LEADS}, the months ahead that are judged");
        ensure!(self.steps >= 1, "--steps must be at least 1");
        ensure!(
            self.windows >= 1 && self.ensemble >= 1 && self.width >= 1,
            "--windows, --ensemble and --width must be at least 1"
        );
        ensure!(self.threads >= 1, "--threads must be at least 1");
        ensure!(
            self.lr > 0.0 && self.shrinkage >= 0.0 && self.weight_decay >= 0.0,
            "--lr must be above zero, and neither --shrinkage nor --weight-decay below it"
        );
        Ok(())
    }

    /// The device of every tensor.
    pub(crate) fn device(&self) -> Device {
        match self.device {
            Place::Cpu => Device::Cpu,
            Place::Cuda => Device::Cuda(0),
        }
    }

    /// Rows of every tensor of a training rollout.
    pub(crate) fn rows(&self) -> usize {
        self.windows * self.ensemble
    }
}
