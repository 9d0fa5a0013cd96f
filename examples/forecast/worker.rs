//! One arm of the comparison, in a process of its own: memory of one arm never shows in the other's figures.
//!
//! The parent writes a line for each step that it wants; the worker answers with one line of JSON.

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;

use crate::options::Options;
use crate::process::{Sample, Sampler, cpu_seconds, memory_mb};
use crate::setup::Setup;
use crate::train::{Arm, Batch, pass};

/// The answer to one step.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct StepReport {
    /// The loss of the rollout.
    pub(crate) loss: f64,
    /// Processor seconds of the step; on a GPU, seconds until it was done.
    pub(crate) seconds: f64,
    /// The highest resident memory so far, less what was resident before the first step.
    pub(crate) peak_mb: f64,
    /// Resident memory over the first step.
    pub(crate) memory: Vec<Sample>,
}

/// Where the parent leaves the trained weights.
pub(crate) fn weights_file(out: &Path) -> PathBuf {
    out.join("forecaster.safetensors")
}

/// Where a worker leaves the gradients of its first step.
pub(crate) fn gradients_file(out: &Path, arm: Arm) -> PathBuf {
    out.join(format!("gradients-{arm:?}.bin").to_lowercase())
}

/// Answers steps until the parent closes the pipe.
pub(crate) fn serve(arm: Arm, options: &Options) -> Result<()> {
    tch::set_num_threads(1);
    let mut setup = Setup::new(options)?;
    let weights = weights_file(&options.out);
    setup.store.load(&weights).with_context(|| format!("cannot load {}", weights.display()))?;
    tch::manual_seed(options.seed);
    let batch = Batch::draw(&setup.anomalies[..setup.split], options)?;
    let before = memory_mb("VmRSS")?;
    for (index, line) in std::io::stdin().lock().lines().enumerate() {
        line?;
        let report = step(arm, &setup, &batch, options, before, index == 0)?;
        if index == 0 {
            std::fs::write(gradients_file(&options.out, arm), gradient_bytes(&setup.store)?)?;
        }
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
        out.flush()?;
    }
    Ok(())
}

/// One rollout, forward and backward, with the same weights, windows and noise each time.
fn step(arm: Arm, setup: &Setup, batch: &Batch, options: &Options, before: f64, first: bool) -> Result<StepReport> {
    for (_, mut variable) in setup.store.variables() {
        variable.zero_grad();
    }
    tch::manual_seed(options.seed);
    let sampler = first.then(Sampler::start);
    let (cpu, wall) = (cpu_seconds(), Instant::now());
    let (loss, _) = pass(arm, setup, batch, options)?;
    if let tch::Device::Cuda(index) = options.device() {
        tch::Cuda::synchronize(i64::try_from(index)?);
    }
    let seconds = if options.device().is_cuda() { wall.elapsed().as_secs_f64() } else { cpu_seconds() - cpu };
    let memory = sampler.map(Sampler::finish).unwrap_or_default();
    Ok(StepReport { loss, seconds, peak_mb: memory_mb("VmHWM")? - before, memory })
}

/// The gradients of all variables by name, as bytes.
fn gradient_bytes(store: &VarStore) -> Result<Vec<u8>> {
    let mut variables: Vec<_> = store.variables().into_iter().collect();
    variables.sort_by(|left, right| left.0.cmp(&right.0));
    let mut bytes = Vec::new();
    for (name, variable) in variables {
        let gradient = variable.grad();
        anyhow::ensure!(gradient.defined(), "{name} got no gradient");
        let values = Vec::<f32>::try_from(gradient.to_device(tch::Device::Cpu).flatten(0, -1))?;
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    Ok(bytes)
}
