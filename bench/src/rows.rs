//! From the rounds to one row for each arm: medians of each round's own quotients.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::arm::Measured;
use crate::check::Checked;
use crate::launch::PEERS;
use crate::law::{Parts, count};
use crate::modes::Mode;
use crate::rounds::{Round, Rounds};
use crate::workload::Workload;

/// One arm of one workload. Times are processor seconds of a step, unless they are called `wall`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) workload: Workload,
    pub(crate) arm: String,
    pub(crate) blocks: i64,
    pub(crate) threads: i32,
    /// Medians over the rounds of each process's least step.
    pub(crate) wall_median: f64,
    pub(crate) cpu_median: f64,
    /// Medians over the rounds.
    pub(crate) peak_mb: f64,
    pub(crate) page_faults: f64,
    /// Over the plain arm of the same language in the same round: median, and how far it spreads.
    pub(crate) ratio_to_plain: f64,
    pub(crate) ratio_least: f64,
    pub(crate) ratio_most: f64,
    pub(crate) wall_ratio_to_plain: f64,
    /// This ratio over a peer's, by peer.
    pub(crate) ratio_to_peers: BTreeMap<String, f64>,
    /// What a block costs more than in plain training, in microseconds.
    pub(crate) overhead_us: f64,
    pub(crate) live_peak_mb: Option<f64>,
    pub(crate) saved_bytes: Option<u64>,
    pub(crate) graph_bytes: Option<u64>,
    pub(crate) gradient_bytes_copied: Option<u64>,
    /// What the law makes of the plain arm's parts, and that over what was measured.
    pub(crate) predicted_ratio: Option<f64>,
    pub(crate) predicted_over_measured: Option<f64>,
    pub(crate) parts: Option<Parts>,
    /// A hash of all gradients' bits, on one thread, and how far they are from the plain ones.
    pub(crate) gradients: Option<String>,
    pub(crate) relative_difference: Option<f64>,
    pub(crate) grad_norm: f64,
    /// Rounds that were run again, and those that stayed noisy.
    pub(crate) rounds_repeated: usize,
    pub(crate) rounds_noisy: usize,
    pub(crate) rounds: Vec<Point>,
}

/// One round of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) cpu: f64,
    pub(crate) plain_cpu: f64,
    pub(crate) wall: f64,
    pub(crate) plain_wall: f64,
    pub(crate) ratio: f64,
    pub(crate) peak_mb: f64,
}

/// The rows of one workload. A gradient that is not the plain one's is an error.
pub(crate) fn rows(workload: Workload, arms: &[String], rounds: &Rounds, checks: &[Checked]) -> Result<Vec<Row>> {
    ensure!(!rounds.all.is_empty(), "no rounds");
    for checked in checks {
        right_gradients(checked)?;
    }
    arms.iter().map(|arm| row(workload, arm, rounds, checks.iter().find(|checked| checked.arm == *arm))).collect()
}

/// Each block sums up its gradients as plain autograd does, so every bit is the same.
fn right_gradients(checked: &Checked) -> Result<()> {
    ensure!(
        checked.gradients == checked.plain_gradients,
        "WRONG GRADIENTS: `{}` of {} with {} blocks is {:e} away from plain autograd ({} instead of {})",
        checked.arm,
        checked.workload.name(),
        checked.blocks,
        checked.relative_difference,
        checked.gradients,
        checked.plain_gradients
    );
    Ok(())
}

fn row(workload: Workload, arm: &str, rounds: &Rounds, checked: Option<&Checked>) -> Result<Row> {
    let runs: Vec<(&Measured, &Measured)> =
        rounds.all.iter().map(|round| Ok((of(round, arm)?, of(round, base(arm))?))).collect::<Result<_>>()?;
    let median_of = |value: &dyn Fn(&(&Measured, &Measured)) -> f64| median(runs.iter().map(value));
    let (first, _) = runs[0];
    let points: Vec<_> = runs.iter().map(|(run, plain)| point(run, plain)).collect();
    let ratio = median(points.iter().map(|point| point.ratio));
    let predicted = Mode::named(arm).filter(|&mode| mode != Mode::Plain).map(|mode| {
        let parts = rounds.all.iter().filter_map(|round| round.get("plain")?.parts);
        median(parts.map(|parts| mode.law().ratio(&parts, first.blocks, workload.levels())))
    });
    Ok(Row {
        workload,
        arm: arm.to_owned(),
        blocks: first.blocks,
        threads: first.threads,
        wall_median: median_of(&|(run, _)| run.wall_min),
        cpu_median: median_of(&|(run, _)| run.cpu_min),
        peak_mb: median_of(&|(run, _)| run.peak_mb),
        page_faults: median_of(&|(run, _)| faults(run)),
        ratio_to_plain: ratio,
        ratio_least: points.iter().map(|point| point.ratio).fold(f64::INFINITY, f64::min),
        ratio_most: points.iter().map(|point| point.ratio).fold(0.0, f64::max),
        wall_ratio_to_plain: median_of(&|(run, plain)| run.wall_min / plain.wall_min),
        ratio_to_peers: to_peers(arm, rounds)?,
        overhead_us: median_of(&|(run, plain)| (run.cpu_min - plain.cpu_min) / count(run.blocks) * 1e6),
        live_peak_mb: checked.map(|checked| checked.live_peak_mb),
        saved_bytes: checked.and_then(|checked| checked.saved_bytes),
        graph_bytes: checked.and_then(|checked| checked.graph_bytes),
        gradient_bytes_copied: checked.and_then(|checked| checked.gradient_bytes_copied),
        predicted_ratio: predicted,
        predicted_over_measured: predicted.map(|predicted| predicted / ratio),
        parts: first.parts,
        gradients: checked.map(|checked| checked.gradients.clone()),
        relative_difference: checked.map(|checked| checked.relative_difference),
        grad_norm: first.grad_norm,
        rounds_repeated: rounds.repeated,
        rounds_noisy: rounds.noisy,
        rounds: points,
    })
}

fn point(run: &Measured, plain: &Measured) -> Point {
    Point {
        cpu: run.cpu_min,
        plain_cpu: plain.cpu_min,
        wall: run.wall_min,
        plain_wall: plain.wall_min,
        ratio: run.cpu_min / plain.cpu_min,
        peak_mb: run.peak_mb,
    }
}

/// Page faults as a number to calculate with.
#[expect(clippy::cast_precision_loss, reason = "far from 2^53")]
pub(crate) fn faults(run: &Measured) -> f64 {
    run.page_faults as f64
}

/// An arm's ratio over that of each peer in the same round.
fn to_peers(arm: &str, rounds: &Rounds) -> Result<BTreeMap<String, f64>> {
    let mut ratios = BTreeMap::new();
    if is_peer(arm) {
        return Ok(ratios);
    }
    for (peer, _) in PEERS.iter().filter(|(peer, _)| rounds.all[0].contains_key(*peer)) {
        let quotients = rounds.all.iter().map(|round| {
            let own = |arm| Ok::<_, anyhow::Error>(of(round, arm)?.cpu_min / of(round, base(arm))?.cpu_min);
            Ok(own(arm)? / own(peer)?)
        });
        ratios.insert((*peer).to_owned(), median(quotients.collect::<Result<Vec<_>>>()?.into_iter()));
    }
    Ok(ratios)
}

/// Whether Python runs the arm.
pub(crate) fn is_peer(arm: &str) -> bool {
    PEERS.iter().any(|(peer, _)| *peer == arm)
}

/// The plain arm of the same language.
fn base(arm: &str) -> &'static str {
    if is_peer(arm) { "python-plain" } else { "plain" }
}

fn of<'r>(round: &'r Round, arm: &str) -> Result<&'r Measured> {
    round.get(arm).with_context(|| format!("a round without `{arm}`"))
}

/// The middle value; the mean of the two in the middle.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
