//! The table on standard output.

use crate::rows::Row;

/// One line for each arm, below a heading for each workload.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    let mut workload = None;
    for row in rows {
        if workload != Some(row.workload) {
            workload = Some(row.workload);
            text += &heading(row);
        }
        text += &line(row);
    }
    text
}

fn heading(row: &Row) -> String {
    let peers = "  over nonreentrant  reentrant  reference";
    format!(
        "\n{}, {} blocks ({} rounds, {} run again, {} noisy)\n{:22}{:>9}{:>9}{:>8}{:>14}{:>9}{:>11}{:>9}{:>9}{:>12}{:>11}{}\n",
        row.workload.name(),
        row.blocks,
        row.rounds.len(),
        row.rounds_repeated,
        row.rounds_noisy,
        "arm",
        "cpu s",
        "wall s",
        "ratio",
        "least..most",
        "law",
        "law/ratio",
        "RSS MiB",
        "live MiB",
        "saved bytes",
        "us/block",
        if row.ratio_to_peers.is_empty() { "" } else { peers },
    )
}

fn line(row: &Row) -> String {
    let or_none =
        |value: Option<f64>, digits: usize| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
    let peer = |name: &str| or_none(row.ratio_to_peers.get(name).copied(), 3);
    let peers = if row.ratio_to_peers.is_empty() {
        String::new()
    } else {
        format!("{:>19}{:>11}{:>11}", peer("nonreentrant"), peer("reentrant"), peer("reference"))
    };
    format!(
        "{:22}{:>9.4}{:>9.4}{:>8.3}{:>14}{:>9}{:>11}{:>9.1}{:>9}{:>12}{:>11.1}{peers}\n",
        row.arm,
        row.cpu_median,
        row.wall_median,
        row.ratio_to_plain,
        format!("{:.3}..{:.3}", row.ratio_least, row.ratio_most),
        or_none(row.predicted_ratio, 3),
        or_none(row.predicted_over_measured, 3),
        row.peak_mb,
        or_none(row.live_peak_mb, 1),
        row.saved_bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string()),
        row.overhead_us,
    )
}
