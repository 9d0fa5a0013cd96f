//! What the example tells: progress while it works, tables and a line of JSON at the end.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::compare::Comparison;
use crate::evaluate::{Errors, LEADS};
use crate::options::Place;

/// A bar where standard error is a terminal, else a plain line every tenth of the way.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    title: &'static str,
    total: usize,
}

impl Progress {
    /// Starts to show.
    pub(crate) fn start(title: &'static str, total: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} {msg} ({eta} left)");
            let bar = ProgressBar::new(total as u64).with_prefix(title);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self { bar, title, total }
    }

    /// Shows that `done` steps are done.
    pub(crate) fn at(&self, done: usize, message: String) {
        let tenth = |step: usize| step * 10 / self.total;
        match &self.bar {
            Some(bar) => {
                bar.set_position(done as u64);
                bar.set_message(message);
            }
            None if done > 0 && tenth(done) > tenth(done - 1) => {
                eprintln!("{} {done}/{} {message}", self.title, self.total);
            }
            None => {}
        }
    }

    /// Clears the bar.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The line of JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    bitwise_equal: bool,
    plain_peak_mb: f64,
    replay_peak_mb: f64,
    plain_seconds: f64,
    replay_seconds: f64,
    loss_first: f64,
    loss_last: f64,
    test_rmse: f64,
    climatology_rmse: f64,
    persistence_rmse: f64,
    seasonal_naive_rmse: f64,
}

impl Summary {
    /// Gathers the figures.
    pub(crate) fn new(losses: &[f64], errors: &Errors, comparison: &Comparison) -> Self {
        Self {
            bitwise_equal: comparison.bitwise_equal,
            plain_peak_mb: comparison.plain.peak_mb,
            replay_peak_mb: comparison.replay.peak_mb,
            plain_seconds: comparison.plain.seconds,
            replay_seconds: comparison.replay.seconds,
            loss_first: losses.first().copied().unwrap_or(f64::NAN),
            loss_last: losses.last().copied().unwrap_or(f64::NAN),
            test_rmse: errors.model,
            climatology_rmse: errors.climatology,
            persistence_rmse: errors.persistence,
            seasonal_naive_rmse: errors.seasonal_naive,
        }
    }
}

/// Prints how good the forecasts are.
pub(crate) fn print_errors(errors: &Errors, starts: usize) {
    println!("Root mean square error of {starts} forecasts of the held-out years, leads 1 to {LEADS} months together:");
    for (name, error) in [
        ("this model (mean of the ensemble)", errors.model),
        ("climatology (month means of the training years)", errors.climatology),
        ("persistence (last observed value)", errors.persistence),
        ("seasonal naive (twelve months earlier)", errors.seasonal_naive),
    ] {
        println!("  {name:<50} {error:.3}");
    }
}

/// What the environment says to the C library's allocator, and to LibTorch about huge pages: both change what large tensors
/// cost.
fn allocator() -> String {
    let telling = |name: &str| {
        name.starts_with("MALLOC_") || ["GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE"].contains(&name)
    };
    let set: Vec<_> = std::env::vars().filter(|(name, _)| telling(name)).map(|(k, v)| format!("{k}={v}")).collect();
    if set.is_empty() { "none".to_owned() } else { set.join(" ") }
}

/// Prints the two arms side by side.
pub(crate) fn print_comparison(comparison: &Comparison, place: Place) {
    // On a GPU the processor's time says little, and the process's memory is that of the host.
    let (clock, memory) = match place {
        Place::Cpu => ("CPU", "peak memory"),
        Place::Cuda => ("elapsed", "peak host memory"),
    };
    let Comparison { plain, replay, bitwise_equal } = comparison;
    println!("One training step, one thread, each arm in its own process, allocator settings: {}:", allocator());
    println!("  {:<34} {:>12} {:>12} {:>8}", "", "plain", "replay", "ratio");
    println!("  {:<34} {:>12.6} {:>12.6}", "loss", plain.loss, replay.loss);
    let row = |name: &str, left: f64, right: f64, digits: usize| {
        println!("  {name:<34} {left:>12.digits$} {right:>12.digits$} {:>8.2}", right / left);
    };
    row(&format!("{memory} over the start (MB)"), plain.peak_mb, replay.peak_mb, 0);
    row(&format!("{clock} seconds, median of nine"), plain.seconds, replay.seconds, 2);
    let verdict = if *bitwise_equal { "equal bit for bit to" } else { "DIFFERENT from" };
    println!("  gradients of all weights: {verdict} plain autograd of the whole graph");
}
