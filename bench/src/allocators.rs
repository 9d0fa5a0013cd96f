//! The same arms under several settings of the C library's allocator: tensors larger than its threshold are mapped
//! anew each time, and each of their pages is a fault.

use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::compare::write;
use crate::launch::Launcher;
use crate::rows::median;
use crate::workload::Workload;

/// What to run.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    #[arg(long, default_value = "rollout")]
    workload: Workload,
    /// Arms, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "plain,replay")]
    arms: Vec<String>,
    #[arg(long)]
    blocks: Option<i64>,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[arg(long, default_value_t = 2)]
    threads: i32,
    /// Where `allocators.json` goes.
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
}

/// One arm under one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setting {
    pub(crate) workload: Workload,
    pub(crate) arm: String,
    pub(crate) blocks: i64,
    pub(crate) settings: String,
    /// Medians over the rounds of each process's least step.
    pub(crate) cpu: f64,
    pub(crate) wall: f64,
    pub(crate) peak_mb: f64,
    pub(crate) page_faults: f64,
}

/// Variables that set the allocator, each set of them a setting; the first is none. 32 MiB is the most that glibc takes
/// for its threshold.
const SETTINGS: [&[(&str, &str)]; 5] = [
    &[],
    &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")],
    &[("THP_MEM_ALLOC_ENABLE", "1")],
    &[("MALLOC_MMAP_THRESHOLD_", "33554432"), ("MALLOC_TRIM_THRESHOLD_", "8589934592")],
    &[("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "8589934592")],
];

/// Runs all settings in turn, and prints.
pub(crate) fn run(options: &Options) -> Result<()> {
    std::fs::create_dir_all(&options.out)?;
    let blocks = options.blocks.unwrap_or_else(|| options.workload.blocks(false));
    let cases: Vec<_> = SETTINGS.iter().flat_map(|set| options.arms.iter().map(move |arm| (*set, arm))).collect();
    let mut found: Vec<Vec<_>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.rounds {
        for ((set, arm), found) in cases.iter().zip(&mut found) {
            let variables = set.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
            let launcher = Launcher { threads: options.threads, repeats: 3, peers: None, variables };
            found.push(launcher.time(options.workload, arm, blocks)?);
        }
    }
    let mut all = Vec::new();
    for ((set, arm), found) in cases.iter().zip(&found) {
        let names: Vec<_> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let setting = Setting {
            workload: options.workload,
            arm: (*arm).clone(),
            blocks,
            settings: if names.is_empty() { "default".to_owned() } else { names.join(" ") },
            cpu: median(found.iter().map(|run| run.cpu_min)),
            wall: median(found.iter().map(|run| run.wall_min)),
            peak_mb: median(found.iter().map(|run| run.peak_mb)),
            page_faults: median(found.iter().map(crate::rows::faults)),
        };
        println!(
            "{} {:8} cpu {:.3} s, wall {:.3} s, peak {:.0} MiB, {:.0} faults: {}",
            setting.workload.name(),
            setting.arm,
            setting.cpu,
            setting.wall,
            setting.peak_mb,
            setting.page_faults,
            setting.settings
        );
        all.push(setting);
    }
    write(&options.out, "allocators.json", &all)
}
