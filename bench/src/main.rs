//! Times and memory of replay blocks, beside plain autograd and PyTorch's own checkpointing; the package's README says
//! how to run it and what the figures mean.

#![forbid(unsafe_code)]

mod allocators;
mod arm;
mod check;
mod compare;
mod gradients;
mod instructions;
mod launch;
mod law;
mod machine;
mod markdown;
mod models;
mod modes;
mod plot;
mod process;
mod rounds;
mod rows;
mod scaling;
mod sharded;
mod sharded_rank;
mod table;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measure times and memory of replay blocks.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench", args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compare: compare::Options,
}

#[derive(Subcommand)]
enum Command {
    /// Run one arm of one workload in this process and print one line of JSON.
    Arm(arm::Options),
    /// Print how live bytes grow with the number of blocks.
    Scaling(scaling::Options),
    /// Count the instructions of a block with valgrind.
    Instructions(instructions::Options),
    /// Time an arm under several settings of the C library's allocator.
    Allocators(allocators::Options),
    /// Compare sharded training with PyTorch's FSDP2.
    Sharded(sharded::Options),
    /// Be one process of it.
    #[command(hide = true)]
    ShardedRank(sharded_rank::Shape),
    /// Write the document from the results of earlier runs.
    Report {
        /// The document.
        file: PathBuf,
        /// Where the results are.
        #[arg(long, default_value = "target/bench")]
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    match &cli.command {
        None => compare::run(&cli.compare),
        Some(Command::Arm(options)) => arm::run(options),
        Some(Command::Scaling(options)) => scaling::run(options),
        Some(Command::Instructions(options)) => instructions::run(options),
        Some(Command::Allocators(options)) => allocators::run(options),
        Some(Command::Sharded(options)) => sharded::run(options),
        Some(Command::ShardedRank(shape)) => sharded_rank::run(shape),
        Some(Command::Report { file, out }) => markdown::write(out, file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_peers_need_a_python() {
        assert!(Cli::try_parse_from(["bench", "--peers", "peers.py"]).is_err());
        assert!(Cli::try_parse_from(["bench", "--quick", "--python", "p", "--peers", "peers.py"]).is_ok());
    }
}
