//! Times and memory of replay blocks, beside plain autograd and PyTorch's own checkpointing; `bench/README.md` says how.

#![forbid(unsafe_code)]

mod arm;
mod models;
mod modes;
mod process;
mod workload;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Benchmarks of replay blocks.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one arm of one workload in this process and print one line of JSON.
    Arm(arm::Options),
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Arm(options) => arm::run(&options),
    }
}
