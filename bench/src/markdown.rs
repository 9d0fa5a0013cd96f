//! The document: every figure in it comes from files of results.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;

use crate::allocators::Setting;
use crate::instructions::Counted;
use crate::machine::Machine;
use crate::modes::Mode;
use crate::rows::{Row, is_peer};
use crate::scaling::{self, Point};

const BEGINNING: &str = "# Benchmarks

Written by `cargo xtask bench report` from the results of the runs below.
`bench/README.md` says how to run them and what each column means.
";

const RATIOS: &str = "
Ratios are medians over the rounds of each round's own quotient of processor seconds, the least step of a process divided by
that of the plain arm of the same language. *law* is the ratio that the law makes of the plain arm's own parts (forward without graph `f`, forward
`F`, backward `b`), *law / ratio* is the efficiency. *RSS* and *live* are peaks over what there was before the first step, in MiB. *graph bytes*
are those of recorded graphs without their tensors, estimated; *copied* are bytes of gradients that were copied.
";

const ALLOCATOR: &str = "
## The allocator

glibc maps each tensor that is larger than its threshold (32 MiB at most) anew, and the kernel clears each of its pages at a
fault; it also gives the top of its heap back when enough of it is free, and faults it in again for the next block. So faults
differ from arm to arm, and between runs of one, by a few per cent of the time. Plain training under other settings:

";

/// Writes the document from what is in the folder; parts that were not run are left out.
pub(crate) fn write(out: &Path, file: &Path) -> Result<()> {
    let rows: Vec<Row> = read(out, "results.json")?.with_context(|| format!("no results in {}", out.display()))?;
    let machine: Machine = read(out, "run.json")?.with_context(|| format!("no run.json in {}", out.display()))?;
    let text = document(
        &rows,
        &machine,
        &read::<Vec<_>>(out, "scaling.json")?.unwrap_or_default(),
        &read::<Vec<_>>(out, "allocators.json")?.unwrap_or_default(),
        &read::<Vec<_>>(out, "instructions.json")?.unwrap_or_default(),
    )?;
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

fn read<T: DeserializeOwned>(out: &Path, name: &str) -> Result<Option<T>> {
    let file = out.join(name);
    if !file.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(Some(serde_json::from_str(&text).with_context(|| format!("{} is of another version", file.display()))?))
}

fn document(
    rows: &[Row],
    machine: &Machine,
    points: &[Point],
    settings: &[Setting],
    counted: &[Counted],
) -> Result<String> {
    let mut text = BEGINNING.to_owned();
    writeln!(text, "\n{}, `cargo xtask bench {}`:\n", machine.date, shown(&machine.command))?;
    for line in machine.lines() {
        writeln!(text, "* {line}")?;
    }
    text += RATIOS;
    let mut workload = None;
    for row in rows {
        if workload != Some(row.workload) {
            workload = Some(row.workload);
            heading(&mut text, row)?;
        }
        line(&mut text, row)?;
    }
    losses(&mut text, rows)?;
    if !points.is_empty() {
        text += "\n## Memory and the number of blocks\n\n";
        for growth in scaling::growths(points) {
            writeln!(text, "* {growth}")?;
        }
    }
    if !settings.is_empty() {
        text += ALLOCATOR;
        allocators(&mut text, settings)?;
    }
    if !counted.is_empty() {
        text +=
            "\n## Instructions of a block\n\nCounted by valgrind on one thread, so that noise has no part in it:\n\n";
        for counted in counted {
            let [fewer, more] = counted.blocks;
            let (workload, arm) = (counted.workload.name(), &counted.arm);
            writeln!(text, "* {workload}, {arm}: {:.0} a block (from {fewer} to {more} blocks)", counted.per_block)?;
        }
    }
    Ok(text)
}

/// Paths of the machine are nobody's concern.
fn shown(command: &str) -> String {
    let name = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
    command.split(' ').map(name).collect::<Vec<_>>().join(" ")
}

fn heading(text: &mut String, row: &Row) -> Result<()> {
    writeln!(text, "\n## {}, {} blocks\n", row.workload.name(), row.blocks)?;
    writeln!(
        text,
        "{} rounds; {} were run again because their two plain arms differed by more than 15 %, {} still did.\n",
        row.rounds.len(),
        row.rounds_repeated,
        row.rounds_noisy
    )?;
    text.push_str("| arm | cpu s | wall s | ratio | least..most | law | law / ratio | RSS | live | saved bytes | graph bytes | copied | us a block | over nonreentrant | over reentrant | over reference |\n");
    text.push_str("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    Ok(())
}

fn line(text: &mut String, row: &Row) -> Result<()> {
    let some = |value: Option<f64>, digits: usize| value.map_or_else(String::new, |value| format!("{value:.digits$}"));
    let bytes = |bytes: Option<u64>| bytes.map_or_else(String::new, |bytes| bytes.to_string());
    let peer = |name: &str| some(row.ratio_to_peers.get(name).copied(), 3);
    writeln!(
        text,
        "| {} | {:.4} | {:.4} | {:.3} | {:.3}..{:.3} | {} | {} | {:.1} | {} | {} | {} | {} | {:.1} | {} | {} | {} |",
        row.arm,
        row.cpu_median,
        row.wall_median,
        row.ratio_to_plain,
        row.ratio_least,
        row.ratio_most,
        some(row.predicted_ratio, 3),
        some(row.predicted_over_measured, 3),
        row.peak_mb,
        some(row.live_peak_mb, 1),
        bytes(row.saved_bytes),
        bytes(row.graph_bytes),
        bytes(row.gradient_bytes_copied),
        row.overhead_us,
        peer("nonreentrant"),
        peer("reentrant"),
        peer("reference"),
    )?;
    Ok(())
}

/// Where replay blocks are behind: a peer is faster or smaller, or the law promises more.
fn losses(text: &mut String, rows: &[Row]) -> Result<()> {
    text.push_str("\n## Where replay blocks lose\n\n");
    let before = text.len();
    let ours = rows.iter().filter(|row| Mode::named(&row.arm).is_some_and(|mode| mode != Mode::Plain));
    for row in ours {
        let name = format!("{}, {}", row.workload.name(), row.arm);
        for (peer, ratio) in row.ratio_to_peers.iter().filter(|(peer, ratio)| *peer != "python-plain" && **ratio > 1.0)
        {
            writeln!(text, "* {name}: {ratio:.3} times as slow as {peer}")?;
        }
        let peers = rows.iter().filter(|peer| peer.workload == row.workload && peer.arm != "python-plain");
        for peer in peers.filter(|peer| is_peer(&peer.arm) && peer.peak_mb < row.peak_mb) {
            writeln!(text, "* {name}: RSS peak of {:.1} MiB, {} {:.1}", row.peak_mb, peer.arm, peer.peak_mb)?;
        }
        if let Some(efficiency) = row.predicted_over_measured.filter(|efficiency| *efficiency < 0.97) {
            writeln!(text, "* {name}: {efficiency:.3} of what the law promises")?;
        }
    }
    if text.len() == before {
        text.push_str("Nowhere in this run.\n");
    }
    Ok(())
}

fn allocators(text: &mut String, settings: &[Setting]) -> Result<()> {
    text.push_str("| workload, arm | setting | cpu s | wall s | RSS | page faults |\n|---|---|---|---|---|---|\n");
    for setting in settings {
        writeln!(
            text,
            "| {}, {} | `{}` | {:.3} | {:.3} | {:.0} | {:.0} |",
            setting.workload.name(),
            setting.arm,
            setting.settings,
            setting.cpu,
            setting.wall,
            setting.peak_mb,
            setting.page_faults
        )?;
    }
    Ok(())
}
