//! The benchmark itself: all arms of all workloads, interleaved, and what is made of their answers.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;
use serde::Serialize;

use crate::check::Checked;
use crate::launch::{Launcher, Peers};
use crate::machine::{Machine, load};
use crate::modes::Mode;
use crate::rows::{Row, rows};
use crate::scaling::{self, Point};
use crate::workload::Workload;
use crate::{markdown, plot, rounds, table};

/// What to compare, and how.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// Few blocks and one round: ends within minutes, and says little.
    #[arg(long)]
    quick: bool,
    /// A Python with PyTorch, for the peers' arms.
    #[arg(long, requires = "peers", value_name = "PATH")]
    python: Option<PathBuf>,
    /// The script that runs the peers' arms: `peers.py WORKLOAD ARM BLOCKS REPEATS --threads N`.
    #[arg(long, requires = "python", value_name = "PATH")]
    peers: Option<PathBuf>,
    /// Rounds: each runs every arm once. Nine, or one with `--quick`.
    #[arg(long)]
    rounds: Option<usize>,
    /// Workloads, separated by commas; all of them if not given.
    #[arg(long, value_delimiter = ',')]
    workloads: Vec<Workload>,
    /// Arms, separated by commas; the plain ones always run.
    #[arg(long, value_delimiter = ',')]
    arms: Vec<String>,
    /// Blocks of a step, in all workloads.
    #[arg(long)]
    blocks: Option<i64>,
    /// Timed steps of each process.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Threads of each arm.
    #[arg(long, default_value_t = 2)]
    threads: i32,
    /// Where results and pictures go.
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// Write the results as a document, too.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Runs everything; a wrong gradient ends it.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.repeats > 0 && options.rounds != Some(0), "at least one round of one timed step");
    std::fs::create_dir_all(&options.out).with_context(|| format!("cannot make {}", options.out.display()))?;
    let peers = options.python.clone().zip(options.peers.clone());
    let peers = peers.map(|(python, script)| Peers { python, script });
    let launcher = Launcher { threads: options.threads, repeats: options.repeats, peers, variables: Vec::new() };
    let mut machine = Machine::read(&launcher)?;
    write(&options.out, "run.json", &machine)?;
    let mut all = Vec::new();
    for workload in options.workloads() {
        let found = one(options, &launcher, workload)?;
        print!("{}", table::table(&found));
        all.extend(found);
        // What was measured is not lost if something later fails.
        write(&options.out, "results.json", &all)?;
        machine.load_after = load();
        write(&options.out, "run.json", &machine)?;
    }
    let sweep = sweep(options, &launcher)?;
    write(&options.out, "scaling.json", &sweep)?;
    plot::results(&options.out.join("results.png"), &all)?;
    plot::scaling(&options.out.join("scaling.png"), &sweep)?;
    println!("\n{}", machine.lines().join("\n"));
    if let Some(file) = &options.markdown {
        markdown::write(&options.out, file)?;
    }
    println!("\nresults.json, run.json, scaling.json, results.png and scaling.png are in {}", options.out.display());
    Ok(())
}

impl Options {
    fn workloads(&self) -> Vec<Workload> {
        let all = || Workload::value_variants().to_vec();
        if self.workloads.is_empty() { all() } else { self.workloads.clone() }
    }
}

/// All arms of one workload: gradients and live bytes first, then the clock.
fn one(options: &Options, launcher: &Launcher, workload: Workload) -> Result<Vec<Row>> {
    let blocks = options.blocks.unwrap_or_else(|| workload.blocks(options.quick));
    let arms = rounds::arms(workload, launcher, &options.arms);
    let ours = arms.iter().filter(|arm| Mode::named(arm).is_some());
    let checks = ours.map(|arm| launcher.check(workload, arm, blocks)).collect::<Result<Vec<Checked>>>()?;
    let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 9 });
    let rounds = rounds::run(launcher, workload, blocks, &arms, rounds)?;
    rows(workload, &arms, &rounds, &checks)
}

/// Live bytes of more and more blocks: of the decoder, or of the first workload where that is not wanted.
fn sweep(options: &Options, launcher: &Launcher) -> Result<Vec<Point>> {
    let workloads = options.workloads();
    let workload = if workloads.contains(&Workload::Decoder) { Workload::Decoder } else { workloads[0] };
    let points = if options.quick { 3 } else { 4 };
    let blocks: Vec<_> = (0..points).map(|i| workload.least_blocks() << i).collect();
    let mut arms = rounds::arms(workload, launcher, &options.arms);
    arms.retain(|arm| Mode::named(arm).is_some() && arm != "plain-again");
    scaling::sweep(launcher, workload, &arms, &blocks)
}

/// Writes a file of results.
pub(crate) fn write(out: &Path, name: &str, value: &impl Serialize) -> Result<()> {
    let file = out.join(name);
    std::fs::write(&file, serde_json::to_string_pretty(value)? + "\n")
        .with_context(|| format!("cannot write {}", file.display()))
}
