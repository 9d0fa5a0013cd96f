//! Set-up and entry commands of the workspace, run as `cargo xtask <command>`.
//!
//! Nothing here depends on tch, so that these commands build in seconds on a machine without `LibTorch`, and can
//! fetch it.

#![forbid(unsafe_code)]

mod cargo;
mod ci;
mod environment;
mod libtorch;
mod sharded;
mod soak;
mod symbols;
mod unsafe_check;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use environment::Environment;

/// Set-up and entry commands of the replay blocks workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find or fetch `LibTorch` and point the link `.libtorch` at it; the other commands do so by themselves.
    Libtorch {
        /// Ask for a `LibTorch` whose CUDA libraries are complete (a fetch takes several gigabytes).
        #[arg(long)]
        cuda: bool,
        /// Print the folder alone on standard output, for scripts.
        #[arg(long)]
        print: bool,
    },
    /// Run the forecast example; the arguments are its own.
    #[command(disable_help_flag = true)]
    Demo {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Measure times and memory of replay blocks; the arguments are the benchmark's own (`--help`, `--quick`).
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Train a decoder whose parameters are cut over several processes.
    Sharded(sharded::Options),
    /// Run all tests; the arguments go to the test programs (a name to filter by, or `--nocapture`).
    #[command(disable_help_flag = true)]
    Test {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run all that a change must pass: format, lints, docs, tests, where `unsafe` may stand, and what the C++ defines.
    Ci,
    /// Search for faults with random programs and a fuzz target, for as long as it is told.
    Soak(soak::Options),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    let env = Environment::from_process()?;
    match command {
        Command::Libtorch { cuda, print } => {
            let folder = libtorch::ensure(&env, cuda.into())?;
            if print {
                println!("{}", folder.display());
            }
            Ok(())
        }
        Command::Demo { args } => demo(&env, &args),
        Command::Bench { args } => bench(&env, &args),
        Command::Sharded(options) => sharded::run(&env, &options),
        Command::Test { args } => test(&env, &args),
        Command::Ci => ci::run(&env),
        Command::Soak(options) => soak::run(&env, &options),
    }
}

fn demo(env: &Environment, args: &[OsString]) -> Result<()> {
    libtorch::ensure(env, libtorch::Flavour::Cpu)?;
    let mut cargo = cargo::command(env);
    cargo.args(["run", "--locked", "--package", "replay-examples", "--example", "forecast", "--"]);
    cargo::check(cargo.args(args))
}

fn bench(env: &Environment, args: &[OsString]) -> Result<()> {
    libtorch::ensure(env, libtorch::Flavour::Cpu)?;
    let mut cargo = cargo::command(env);
    cargo.args(["run", "--locked", "--package", "replay-bench", "--"]);
    cargo::check(cargo.args(args))
}

fn test(env: &Environment, args: &[OsString]) -> Result<()> {
    libtorch::ensure(env, libtorch::Flavour::Cpu)?;
    let mut cargo = cargo::command(env);
    cargo.args(["test", "--locked", "--workspace", "--"]);
    cargo::check(cargo.args(args))
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
    fn flags_of_the_example_are_handed_on() {
        let cli = Cli::try_parse_from(["xtask", "demo", "--steps", "3", "--help"]).unwrap();
        let Command::Demo { args } = cli.command else { panic!("not the demo") };
        assert_eq!(args, ["--steps", "3", "--help"]);
    }

    #[test]
    fn flags_of_the_benchmark_are_handed_on() {
        let cli = Cli::try_parse_from(["xtask", "bench", "--quick", "--help"]).unwrap();
        let Command::Bench { args } = cli.command else { panic!("not the benchmark") };
        assert_eq!(args, ["--quick", "--help"]);
    }

    #[test]
    fn a_leading_separator_changes_nothing() {
        let cli = Cli::try_parse_from(["xtask", "test", "--", "--nocapture"]).unwrap();
        let Command::Test { args } = cli.command else { panic!("not the tests") };
        assert_eq!(args, ["--nocapture"]);
    }
}
