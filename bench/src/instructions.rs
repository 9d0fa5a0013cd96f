//! Instructions of a block, counted by valgrind: a figure that no other program on the machine can disturb.
//!
//! Each arm runs with two numbers of blocks, two steps of a process each time, one of which has a single block. What the
//! process does beside the blocks is the same in both, so the difference belongs to the blocks.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::compare::write;
use crate::launch::Launcher;
use crate::workload::Workload;

/// What to count.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    #[arg(long, default_value = "tiny")]
    workload: Workload,
    /// Arms, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "plain,replay")]
    arms: Vec<String>,
    /// The two numbers of blocks.
    #[arg(long, value_delimiter = ',', num_args = 1, default_value = "64,1024")]
    blocks: Vec<i64>,
    /// Where `instructions.json` goes.
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

/// The instructions of one arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counted {
    pub(crate) workload: Workload,
    pub(crate) arm: String,
    pub(crate) blocks: [i64; 2],
    pub(crate) per_block: f64,
}

/// Counts and prints.
pub(crate) fn run(options: &Options) -> Result<()> {
    let [fewer, more] = options.blocks[..] else { anyhow::bail!("two numbers of blocks, as 64,1024") };
    ensure!(0 < fewer && fewer < more, "the first number of blocks must be the smaller one");
    if !Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
        println!("skipped: no valgrind (usually the system's package `valgrind`)");
        return Ok(());
    }
    std::fs::create_dir_all(&options.out)?;
    let mut all = Vec::new();
    for arm in &options.arms {
        let [few, many] = [fewer, more].map(|blocks| count(options, arm, blocks));
        let per_block = (many? - few?) / crate::law::count(more - fewer);
        println!("{} {arm}: {per_block:.0} instructions a block", options.workload.name());
        all.push(Counted { workload: options.workload, arm: arm.clone(), blocks: [fewer, more], per_block });
    }
    if let [plain, others @ ..] = &all[..] {
        for other in others {
            println!("{} over {}: {:.0} a block", other.arm, plain.arm, other.per_block - plain.per_block);
        }
    }
    write(&options.out, "instructions.json", &all)
}

fn count(options: &Options, arm: &str, blocks: i64) -> Result<f64> {
    let launcher = Launcher { threads: 1, repeats: 1, peers: None, variables: Vec::new() };
    let inner = launcher.arm(options.workload, arm, blocks, 0)?;
    let file = options.out.join(format!("callgrind-{}-{blocks}.out", std::process::id()));
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--tool=callgrind"]).arg(format!("--callgrind-out-file={}", file.display()));
    command.env_remove("LD_LIBRARY_PATH").arg(inner.get_program()).args(inner.get_args());
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    ensure!(status.success(), "{command:?} failed ({status})");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    std::fs::remove_file(&file)?;
    total(&text).with_context(|| format!("no total in {}", file.display()))
}

fn total(text: &str) -> Option<f64> {
    text.lines().rev().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_the_last_line_of_that_name() {
        assert_eq!(total("version: 1\nsummary: 5\n\ntotals: 1234\n"), Some(1234.0));
        assert_eq!(total("nothing"), None);
    }
}
