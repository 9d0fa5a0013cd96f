//! The rollout, its loss, and the training loop, the same for plain and replayed steps.

use anyhow::{Result, ensure};
use replay_runtime::{Rollout, RolloutReport};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

use crate::climate::Climate;
use crate::data::YEAR;
use crate::options::Options;
use crate::setup::Setup;

/// How the steps of a rollout keep what their backward pass needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arm {
    /// tch's own autograd: every step keeps its whole graph.
    Plain,
    /// Replay blocks: every step keeps its inputs and runs again in the backward pass.
    Replay,
}

/// Windows of the training years that start in the same calendar month, one row for each member of each.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Standardised anomalies, one tensor of rows by 1 for each month of the rollout, and one month more.
    pub(crate) observed: Vec<Tensor>,
    /// The calendar month of the first.
    pub(crate) first_month: i64,
    /// Members of each window: the rows of one window follow each other.
    pub(crate) members: i64,
}

impl Batch {
    /// Windows that start at the given months, `months + 1` observed months each.
    pub(crate) fn new(anomalies: &[f32], starts: &[usize], months: usize, options: &Options) -> Self {
        let rows_of = |offset: usize| -> Vec<f32> {
            starts.iter().flat_map(|start| std::iter::repeat_n(anomalies[start + offset], options.ensemble)).collect()
        };
        let tensor = |offset| Tensor::from_slice(&rows_of(offset)).unsqueeze(1).to_device(options.device());
        Self {
            observed: (0..=months).map(tensor).collect(),
            first_month: (starts[0] % YEAR) as i64,
            members: options.ensemble as i64,
        }
    }

    /// Draws the windows of one training step from the training years.
    pub(crate) fn draw(anomalies: &[f32], options: &Options) -> Result<Self> {
        let last = anomalies.len().checked_sub(options.months + 1 + YEAR);
        ensure!(
            last.is_some(),
            "{} training months are too few for rollouts of {}: lower --months, or hold out less with --test-from",
            anomalies.len(),
            options.months
        );
        let month = Tensor::randint(YEAR as i64, [1], (Kind::Int64, Device::Cpu)).int64_value(&[0]) as usize;
        let candidates: Vec<usize> = (month..anomalies.len() - options.months).step_by(YEAR).collect();
        let order = Vec::<i64>::try_from(Tensor::randperm(candidates.len() as i64, (Kind::Int64, Device::Cpu)))?;
        let starts: Vec<usize> =
            order.iter().cycle().take(options.windows).map(|&index| candidates[index as usize]).collect();
        Ok(Self::new(anomalies, &starts, options.months, options))
    }
}

/// Applies a step month by month: to observed values during the warm-up, then to the rollout's own forecasts.
/// Returns the forecast of each month after the first.
pub(crate) fn unroll(
    batch: &Batch,
    blank: Tensor,
    warm_up: usize,
    mut step: impl FnMut(&Tensor, &Tensor, i64) -> Result<(Tensor, Tensor)>,
) -> Result<Vec<Tensor>> {
    let months = batch.observed.len() - 1;
    let mut state = blank;
    let mut forecasts: Vec<Tensor> = Vec::with_capacity(months);
    for offset in 0..months {
        let input = if offset < warm_up { &batch.observed[offset] } else { &forecasts[offset - 1] };
        let (next, forecast) = step(&state, input, batch.first_month + offset as i64)?;
        state = next;
        forecasts.push(forecast);
    }
    Ok(forecasts)
}

/// What training minimises: the continuous ranked probability score of the ensemble, averaged over months and windows,
/// which is the mean absolute error of the members less half the mean distance between two of them, so that a spread that
/// is honest about the error wins; and a pull towards the month means. Without that pull the model learns how long the
/// few great events of the training years lasted, and carries that over to years that forget faster.
pub(crate) fn score(forecasts: &[Tensor], batch: &Batch, shrinkage: f64) -> Tensor {
    let months = forecasts.len() as i64;
    let members = Tensor::stack(forecasts, 0).reshape([months, -1, batch.members]);
    let truth = Tensor::stack(&batch.observed[1..], 0).reshape([months, -1, batch.members]);
    let error = (&members - truth).abs().mean(Kind::Float);
    let pull = members.mean_dim(2, false, Kind::Float).square().mean(Kind::Float) * shrinkage;
    // Members are exchangeable, so neighbours give the mean distance without forming every pair.
    let distance = (&members - members.roll([1], [2])).abs().mean(Kind::Float);
    // One member has no spread: its neighbour is itself, and the score is the absolute error.
    error - distance * 0.5 + pull
}

/// One forward and backward pass; gradients are in `.grad` afterwards. Returns the loss, and what the replay blocks did.
pub(crate) fn pass(arm: Arm, setup: &Setup, batch: &Batch, options: &Options) -> Result<(f64, Option<RolloutReport>)> {
    let model = &setup.model;
    let blank = model.blank_state(i64::try_from(options.rows())?);
    match arm {
        Arm::Plain => {
            let forecasts =
                unroll(batch, blank, options.warm_up, |state, input, month| Ok(model.step(state, input, month)))?;
            let loss = score(&forecasts, batch, options.shrinkage);
            loss.backward();
            Ok((loss.double_value(&[]), None))
        }
        Arm::Replay => {
            let rollout = Rollout::new(&setup.store);
            let forecasts = unroll(batch, blank, options.warm_up, |state, input, month| {
                Ok(model.step_replay(&rollout, state, input, month)?)
            })?;
            let loss = score(&forecasts, batch, options.shrinkage);
            let report = rollout.backward(&loss)?;
            Ok((loss.double_value(&[]), Some(report)))
        }
    }
}

/// What training leaves beside the weights.
#[derive(Debug)]
pub(crate) struct Trained {
    /// The loss of each step.
    pub(crate) losses: Vec<f64>,
    /// What the replay blocks of the last step did.
    pub(crate) report: Option<RolloutReport>,
}

/// Trains with replay blocks; `progress` is told of each step and its loss.
pub(crate) fn train(setup: &Setup, options: &Options, mut progress: impl FnMut(usize, f64)) -> Result<Trained> {
    let training = &setup.anomalies[..setup.split];
    let mut optimizer = nn::adamw(0.9, 0.99, options.weight_decay).build(&setup.store, options.lr)?;
    let mut trained = Trained { losses: Vec::with_capacity(options.steps), report: None };
    for step in 0..options.steps {
        optimizer.set_lr(options.lr * rate(step, options.steps));
        let batch = Batch::draw(training, options)?;
        optimizer.zero_grad();
        let (loss, report) = pass(Arm::Replay, setup, &batch, options)?;
        ensure!(loss.is_finite(), "the loss is {loss} at step {step}: lower --lr");
        optimizer.clip_grad_norm(1.0);
        optimizer.step();
        progress(step, loss);
        trained.losses.push(loss);
        trained.report = report;
    }
    Ok(trained)
}

/// The learning rate rises over the first tenth and falls to a twentieth along a cosine.
fn rate(step: usize, steps: usize) -> f64 {
    let progress = (step as f64 + 0.5) / steps as f64;
    let rise = (progress / 0.1).min(1.0);
    rise * (0.05 + 0.95 * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()))
}

/// A series as the model sees it.
pub(crate) fn standardised(values: &[f64], climate: &Climate) -> Vec<f32> {
    values.iter().enumerate().map(|(index, &value)| climate.standardise(index, value) as f32).collect()
}
