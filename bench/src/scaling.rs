//! How live bytes grow with the number of blocks.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::check::mebibytes;
use crate::launch::Launcher;
use crate::law::count;
use crate::workload::Workload;

/// What to sweep over.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    #[arg(long, default_value = "decoder")]
    workload: Workload,
    /// Arms, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "plain,replay")]
    arms: Vec<String>,
    /// Numbers of blocks, separated by commas, the least one first.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16")]
    blocks: Vec<i64>,
}

/// The memory of one number of blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) workload: Workload,
    pub(crate) arm: String,
    pub(crate) blocks: i64,
    pub(crate) live_peak_mb: f64,
    pub(crate) saved_bytes: Option<u64>,
}

/// Prints the growth.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.blocks.is_sorted_by(|a, b| a < b), "numbers of blocks must grow");
    let launcher = Launcher { threads: 1, repeats: 1, peers: None, variables: Vec::new() };
    let points = sweep(&launcher, options.workload, &options.arms, &options.blocks)?;
    for point in &points {
        let saved = point.saved_bytes.map_or_else(String::new, |bytes| format!(", {bytes} bytes of inputs saved"));
        println!(
            "{} {}, {} blocks: live peak {:.3} MiB{saved}",
            point.workload.name(),
            point.arm,
            point.blocks,
            point.live_peak_mb
        );
    }
    for growth in growths(&points) {
        println!("{growth}");
    }
    Ok(())
}

/// One step of each arm for each number of blocks.
pub(crate) fn sweep(launcher: &Launcher, workload: Workload, arms: &[String], blocks: &[i64]) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    for arm in arms {
        for &blocks in blocks {
            let checked = launcher.check(workload, arm, blocks)?;
            let (arm, live_peak_mb) = (arm.clone(), checked.live_peak_mb);
            points.push(Point { workload, arm, blocks, live_peak_mb, saved_bytes: checked.saved_bytes });
        }
    }
    Ok(points)
}

/// From the last two points of each arm: what a further block adds to the live peak, and that over the bytes of the
/// inputs that only this block reads.
pub(crate) fn growths(points: &[Point]) -> Vec<String> {
    let pairs = points.windows(2).filter(|pair| pair[0].arm == pair[1].arm);
    let last =
        pairs.filter(|pair| points.iter().all(|other| other.arm != pair[1].arm || other.blocks <= pair[1].blocks));
    last.map(|pair| growth(&pair[0], &pair[1])).collect()
}

fn growth(fewer: &Point, more: &Point) -> String {
    let added = count(more.blocks - fewer.blocks);
    let live = (more.live_peak_mb - fewer.live_peak_mb) / added;
    let inputs = more.saved_bytes.zip(fewer.saved_bytes).map(|(more, fewer)| mebibytes(more - fewer) / added);
    let over = inputs.map_or_else(String::new, |inputs| {
        format!(", {:.3} times the {inputs:.4} MiB of inputs that it alone reads", live / inputs)
    });
    format!(
        "{} {}: each block from {} to {} adds {live:.4} MiB{over}",
        more.workload.name(),
        more.arm,
        fewer.blocks,
        more.blocks
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_that_of_the_last_two_points() {
        let point = |arm: &str, blocks, live_peak_mb, saved| Point {
            workload: Workload::Decoder,
            arm: arm.to_owned(),
            blocks,
            live_peak_mb,
            saved_bytes: saved,
        };
        let points = [
            point("plain", 2, 10.0, None),
            point("plain", 4, 20.0, None),
            point("replay", 2, 5.0, Some(1 << 20)),
            point("replay", 4, 8.0, Some(3 << 20)),
            point("replay", 8, 12.0, Some(7 << 20)),
        ];
        assert_eq!(
            growths(&points),
            [
                "decoder plain: each block from 2 to 4 adds 5.0000 MiB",
                "decoder replay: each block from 4 to 8 adds 1.0000 MiB, 1.000 times the 1.0000 MiB of inputs that it alone reads",
            ]
        );
    }
}
