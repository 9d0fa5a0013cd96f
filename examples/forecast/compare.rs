//! One step plain and one step replayed, each arm in its own process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::options::Options;
use crate::process::Sample;
use crate::train::Arm;
use crate::worker::{StepReport, gradients_file};

/// Timed steps of each arm, alternating; the median counts.
pub(crate) const TIMED: usize = 9;

/// What one arm used.
#[derive(Debug, Clone)]
pub(crate) struct Usage {
    /// The loss of the rollout.
    pub(crate) loss: f64,
    /// Peak memory of the first step over what was resident before it.
    pub(crate) peak_mb: f64,
    /// Seconds of a step.
    pub(crate) seconds: f64,
    /// Resident memory over the first step.
    pub(crate) memory: Vec<Sample>,
}

/// Both arms.
#[derive(Debug, Clone)]
pub(crate) struct Comparison {
    /// tch's own autograd over the whole graph.
    pub(crate) plain: Usage,
    /// Replay blocks.
    pub(crate) replay: Usage,
    /// Whether every gradient has the same bits.
    pub(crate) bitwise_equal: bool,
}

/// Runs both arms; `progress` is told of each finished step.
pub(crate) fn compare(options: &Options, mut progress: impl FnMut(usize)) -> Result<Comparison> {
    let mut plain = Worker::start(Arm::Plain)?;
    let mut replay = Worker::start(Arm::Replay)?;
    let first = [plain.step()?, replay.step()?];
    let mut seconds = [Vec::new(), Vec::new()];
    for round in 0..TIMED {
        progress(round);
        seconds[0].push(plain.step()?.seconds);
        seconds[1].push(replay.step()?.seconds);
    }
    progress(TIMED);
    plain.finish()?;
    replay.finish()?;
    let [plain_seconds, replay_seconds] = seconds.map(median);
    let [plain, replay] = first;
    Ok(Comparison {
        plain: Usage::new(plain, plain_seconds),
        replay: Usage::new(replay, replay_seconds),
        bitwise_equal: same_gradients(options)?,
    })
}

impl Usage {
    fn new(first: StepReport, seconds: f64) -> Self {
        Self { loss: first.loss, peak_mb: first.peak_mb, seconds, memory: first.memory }
    }
}

/// Compares what the workers wrote, and removes it.
fn same_gradients(options: &Options) -> Result<bool> {
    let files = [Arm::Plain, Arm::Replay].map(|arm| gradients_file(&options.out, arm));
    let [plain, replay] = files.each_ref().map(std::fs::read);
    let equal = plain? == replay?;
    for file in files {
        std::fs::remove_file(file)?;
    }
    Ok(equal)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A process of this program that runs one arm.
struct Worker {
    arm: Arm,
    child: Child,
    commands: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts this program again with the same options and one more.
    fn start(arm: Arm) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program to start it again")?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1)).arg("--worker").arg(format!("{arm:?}").to_lowercase());
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start this program again")?;
        let commands = child.stdin.take();
        let reports = BufReader::new(child.stdout.take().context("the worker has no output")?);
        Ok(Self { arm, child, commands, reports })
    }

    /// Asks for one step and waits for its report.
    fn step(&mut self) -> Result<StepReport> {
        let arm = self.arm;
        let mut line = String::new();
        // A worker that failed has closed its pipes and told why on standard error.
        let asked = self.commands.as_mut().is_some_and(|commands| writeln!(commands, "step").is_ok());
        if !asked || self.reports.read_line(&mut line)? == 0 {
            bail!("the {arm:?} arm of the comparison ended early, {}: its message is above", self.child.wait()?);
        }
        serde_json::from_str(&line).with_context(|| format!("the {arm:?} arm of the comparison wrote {line:?}"))
    }

    /// Closes the pipe, which ends the worker.
    fn finish(mut self) -> Result<()> {
        drop(self.commands.take());
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After an error the worker still waits for its next step; closing the pipe lets it end, and `wait` collects it.
        drop(self.commands.take());
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_ignores_outliers() {
        assert!((median(vec![9.0, 1.0, 2.0, 3.0, 100.0]) - 3.0).abs() < 1e-12);
    }
}
