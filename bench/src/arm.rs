//! One workload, one arm, one process: what it took.

use std::time::Instant;

use anyhow::{Context as _, Result};
use replay_runtime::bench_support;
use serde::{Deserialize, Serialize};

use crate::check;
use crate::gradients::{fingerprint, gradients, norm};
use crate::law::{Parts, count};
use crate::modes::Mode;
use crate::process::{cpu_seconds, memory_mb, page_faults};
use crate::workload::{How, Setup, Workload};

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
    /// Instead of the time, take one step's live bytes, and compare its gradients with those of a plain step.
    #[arg(long)]
    pub(crate) check: bool,
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
    /// What a plain step consists of.
    #[serde(default)]
    pub(crate) parts: Option<Parts>,
    /// The version of LibTorch.
    #[serde(default)]
    pub(crate) torch: String,
}

/// Runs and prints the answer.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mode = Mode::named(&options.arm).with_context(|| format!("there is no arm `{}`", options.arm))?;
    let answer = if options.check {
        serde_json::to_string(&check::check(options, mode)?)?
    } else {
        serde_json::to_string(&measure(options, mode)?)?
    };
    println!("{answer}");
    Ok(())
}

fn measure(options: &Options, mode: Mode) -> Result<Measured> {
    tch::set_num_threads(options.threads);
    // What LibTorch sets up at its first step is no part of the peak; the peers do the same.
    Setup::new(Workload::Tiny, 1)?.train(mode, || ())?;
    let mut setup = Setup::new(options.workload, options.blocks)?;
    let base = memory_mb("VmRSS")?;
    setup.forget_gradients();
    let (loss, report) = setup.train(mode, || ())?;
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for _ in 0..options.repeats {
        let (wall_start, cpu_start) = (Instant::now(), cpu_seconds());
        let mut cpu_between = cpu_start;
        setup.forget_gradients();
        setup.train(mode, || cpu_between = cpu_seconds())?;
        wall.push(wall_start.elapsed().as_secs_f64());
        let cpu_end = cpu_seconds();
        cpu.push(cpu_end - cpu_start);
        forward.push(cpu_between - cpu_start);
        backward.push(cpu_end - cpu_between);
    }
    let peak_mb = memory_mb("VmHWM")? - base;
    let page_faults = page_faults()?;
    let gradients = gradients(&setup);
    let per_block = |seconds: &[f64]| least(seconds) / count(options.blocks);
    let plain =
        (mode == Mode::Plain).then(|| parts(&setup, options.repeats, per_block(&forward), per_block(&backward)));
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
        gradients: Some(fingerprint(&gradients)),
        parts: plain.transpose()?,
        torch: bench_support::libtorch_version(),
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

/// The parts of a plain step that the step itself does not show, each the least of `repeats`.
fn parts(setup: &Setup, repeats: usize, forward: f64, backward: f64) -> Result<Parts> {
    let time = |run: &dyn Fn() -> Result<()>| -> Result<f64> {
        let mut seconds = Vec::new();
        for _ in 0..repeats {
            let start = cpu_seconds();
            run()?;
            seconds.push(cpu_seconds() - start);
        }
        Ok(least(&seconds))
    };
    let bare = time(&|| tch::no_grad(|| setup.forward(&How::Plain).map(drop)).map_err(Into::into))?;
    // Both alone and with the graph dropped at once, so that the quotient is one of the operations'.
    let state = setup.first.detach().set_requires_grad(true);
    let again = |step: &dyn Fn()| {
        time(&|| {
            (0..setup.blocks).for_each(|_| step());
            Ok(())
        })
    };
    let head = again(&|| drop(setup.model.until_last_save(&state, &setup.cond)))?;
    let whole = again(&|| drop(setup.model.step(&state, &setup.cond)))?;
    let bare_forward = bare / count(setup.blocks);
    Ok(Parts { bare_forward, forward, until_last_save: forward * (head / whole).min(1.0), backward })
}
