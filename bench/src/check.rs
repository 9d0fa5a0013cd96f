//! One step of an arm without a clock: live bytes, counted exactly, and gradients, compared with a plain step's.

use anyhow::{Result, ensure};
use replay_runtime::bench_support;
use serde::{Deserialize, Serialize};

use crate::arm::Options;
use crate::gradients::{difference, fingerprint, gradients};
use crate::modes::Mode;
use crate::workload::{Setup, Workload};

/// The answer, one line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checked {
    pub(crate) workload: Workload,
    pub(crate) arm: String,
    pub(crate) blocks: i64,
    /// The most bytes of CPU tensors that lived at once during the step, less those that lived before it, in MiB.
    pub(crate) live_peak_mb: f64,
    /// Bytes of inputs that the rollout kept.
    pub(crate) saved_bytes: Option<u64>,
    /// Bytes of recorded graphs themselves, an estimate.
    pub(crate) graph_bytes: Option<u64>,
    /// Bytes of gradients that were copied on their way to the parameters.
    pub(crate) gradient_bytes_copied: Option<u64>,
    /// A hash of the bits of all gradients, and of those of a plain step in this process.
    pub(crate) gradients: String,
    pub(crate) plain_gradients: String,
    /// The norm of the difference over that of the plain step's gradients.
    pub(crate) relative_difference: f64,
}

/// Runs one step of the arm, and then a plain one, in this process.
pub(crate) fn check(options: &Options, mode: Mode) -> Result<Checked> {
    ensure!(bench_support::count_live_bytes()?, "this process has other threads already: nothing can be counted");
    tch::set_num_threads(options.threads);
    Setup::new(Workload::Tiny, 1)?.train(mode, || ())?;
    let mut setup = Setup::new(options.workload, options.blocks)?;
    setup.forget_gradients();
    let base = bench_support::live_bytes();
    bench_support::reset_live_peak();
    let (_, report) = setup.train(mode, || ())?;
    let live = bench_support::live_peak() - base;
    let found = gradients(&setup);
    setup.forget_gradients();
    setup.train(Mode::Plain, || ())?;
    let plain = gradients(&setup);
    Ok(Checked {
        workload: options.workload,
        arm: options.arm.clone(),
        blocks: options.blocks,
        live_peak_mb: mebibytes(live),
        saved_bytes: report.as_ref().map(|report| report.total.bytes_saved),
        graph_bytes: report.as_ref().map(|report| report.total.bytes_graphs),
        gradient_bytes_copied: report.map(|report| report.gradient_bytes_copied),
        gradients: fingerprint(&found),
        plain_gradients: fingerprint(&plain),
        relative_difference: difference(&found, &plain),
    })
}

/// Bytes as MiB.
#[expect(clippy::cast_precision_loss, reason = "for people to read")]
pub(crate) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
