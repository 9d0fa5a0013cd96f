//! One workload, one arm, one process: what it took.

use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::modes::Mode;
use crate::process::{cpu_seconds, memory_mb, page_faults};
use crate::workload::{Setup, Workload};

/// What to run.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// What is trained.
    pub(crate) workload: Workload,
    /// The arm: `plain`, `replay`, ..
    pub(crate) arm: String,
    /// Blocks of a step.
    pub(crate) blocks: i64,
    /// Timed steps, after one that is not.
    pub(crate) repeats: usize,
    /// Threads of LibTorch.
    #[arg(long, default_value_t = 2)]
    pub(crate) threads: i32,
}

/// The answer, one line of JSON. The Python peers' answer has the first fields too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) workload: Workload,
    pub(crate) arm: String,
    pub(crate) blocks: i64,
    pub(crate) threads: i32,
    /// Seconds of a step: least and median.
    pub(crate) wall_min: f64,
    pub(crate) wall_median: f64,
    /// Processor seconds of all threads.
    pub(crate) cpu_min: f64,
    pub(crate) cpu_median: f64,
    /// The highest resident memory, less what was resident right before the first step, in MiB.
    pub(crate) peak_mb: f64,
    pub(crate) page_faults: u64,
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    /// Bytes of inputs that the rollout kept.
    #[serde(default)]
    pub(crate) saved_bytes: Option<u64>,
    /// A hash of the bits of all gradients.
    #[serde(default)]
    pub(crate) gradients: Option<String>,
}

/// Runs and prints the answer.
pub(crate) fn run(options: &Options) -> Result<()> {
    println!("{}", serde_json::to_string(&measure(options)?)?);
    Ok(())
}

fn measure(options: &Options) -> Result<Measured> {
    let mode = Mode::named(&options.arm).with_context(|| format!("there is no arm `{}`", options.arm))?;
    tch::set_num_threads(options.threads);
    // What LibTorch sets up at its first step is no part of the peak; the peers do the same.
    Setup::new(Workload::Tiny, 1)?.train(mode, || ())?;
    let mut setup = Setup::new(options.workload, options.blocks)?;
    let base = memory_mb("VmRSS")?;
    setup.forget_gradients();
    let (loss, report) = setup.train(mode, || ())?;
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..options.repeats {
        let (wall_start, cpu_start) = (Instant::now(), cpu_seconds());
        setup.forget_gradients();
        setup.train(mode, || ())?;
        wall.push(wall_start.elapsed().as_secs_f64());
        cpu.push(cpu_seconds() - cpu_start);
    }
    let peak_mb = memory_mb("VmHWM")? - base;
    let page_faults = page_faults()?;
    let gradients = gradients(&setup);
    Ok(Measured {
        workload: options.workload,
        arm: options.arm.clone(),
        blocks: options.blocks,
        threads: options.threads,
        wall_min: least(&wall),
        wall_median: median(&mut wall),
        cpu_min: least(&cpu),
        cpu_median: median(&mut cpu),
        peak_mb,
        page_faults,
        loss,
        grad_norm: norm(&gradients),
        saved_bytes: report.map(|report| report.total.bytes_saved),
        gradients: Some(format!("{:016x}", hash(&gradients))),
    })
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The middle value, the upper one of two as in the peers.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// All gradients, by name.
fn gradients(setup: &Setup) -> Vec<(String, Option<Tensor>)> {
    let grad = |tensor: &Tensor| Some(tensor.grad()).filter(Tensor::defined);
    let mut all: Vec<_> = setup.vs.variables().iter().map(|(name, tensor)| (name.clone(), grad(tensor))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn norm(gradients: &[(String, Option<Tensor>)]) -> f64 {
    let squares = |tensor: &Tensor| tensor.to_kind(tch::Kind::Double).square().sum(tch::Kind::Double).double_value(&[]);
    gradients.iter().filter_map(|(_, grad)| grad.as_ref()).map(squares).sum::<f64>().sqrt()
}

/// FNV-1a over the bits of all gradients, and over which there are.
fn hash(gradients: &[(String, Option<Tensor>)]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    for (name, grad) in gradients {
        name.bytes().for_each(&mut feed);
        feed(u8::from(grad.is_some()));
        grad.iter().flat_map(bytes).for_each(&mut feed);
    }
    hash
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.contiguous();
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}
