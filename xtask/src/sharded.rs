//! Starts the example `sharded` as several processes of this machine, as torchrun would.

use std::ffi::OsString;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::cargo;
use crate::environment::Environment;
use crate::libtorch;

/// How long the others have to end by themselves once one has failed: each of them says why.
const GRACE: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How many processes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    world: u16,
    /// The example's own arguments (`--help`, `--check`, `--layers 8`).
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(env: &Environment, options: &Options) -> Result<()> {
    libtorch::ensure(env, libtorch::Flavour::Cpu)?;
    let example = ["--locked", "--package", "replay-examples", "--example", "sharded"];
    cargo::check(cargo::command(env).arg("build").args(example))?;
    let port = free_port()?;
    let rank = |rank: u16| {
        // Cargo becomes the program: there is no process between.
        let mut command = cargo::command(env);
        command.arg("run").arg("--quiet").args(example).arg("--").args(&options.args);
        as_rank(&mut command, rank, options.world, port);
        command.spawn().context("cargo cannot be started")
    };
    let mut ranks = (0..options.world).map(rank).collect::<Result<Vec<_>>>()?;
    let ended = wait(&mut ranks)?;
    let failed: Vec<_> = ended.iter().enumerate().filter(|(_, status)| !status.success()).collect();
    if failed.is_empty() {
        return Ok(());
    }
    let list = failed.iter().map(|(rank, status)| format!("rank {rank} ({status})")).collect::<Vec<_>>();
    bail!("{} of {} processes failed: {}", failed.len(), options.world, list.join(", "))
}

/// A port of this machine that nobody has at the moment.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

/// What torchrun would set.
fn as_rank(command: &mut Command, rank: u16, world: u16, port: u16) {
    let (rank, world) = (rank.to_string(), world.to_string());
    command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &world).env("LOCAL_WORLD_SIZE", &world);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("OMP_NUM_THREADS", "1");
    command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
}

/// Waits for all of them, no longer than `GRACE` once one has failed.
fn wait(ranks: &mut [Child]) -> Result<Vec<ExitStatus>> {
    let mut ended: Vec<Option<ExitStatus>> = vec![None; ranks.len()];
    let mut failed_at: Option<Instant> = None;
    while ended.iter().any(Option::is_none) {
        for (rank, status) in ranks.iter_mut().zip(&mut ended).filter(|(_, status)| status.is_none()) {
            *status = rank.try_wait()?;
            if status.is_some_and(|status| !status.success()) {
                failed_at.get_or_insert_with(Instant::now);
            }
        }
        if failed_at.is_some_and(|at| at.elapsed() > GRACE) {
            for (rank, _) in ranks.iter_mut().zip(&ended).filter(|(_, status)| status.is_none()) {
                rank.kill()?;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(ended.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).spawn().unwrap()
    }

    #[test]
    fn what_each_rank_is_told() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"]);
        as_rank(&mut command, 1, 3, 4711);
        assert_eq!(String::from_utf8(command.output().unwrap().stdout).unwrap(), "1 1 3 3 127.0.0.1 4711\n");
    }

    #[test]
    fn the_status_of_each_is_told() {
        let mut ranks = ["true", "exit 3", "sleep 0.1"].map(shell);
        let codes: Vec<_> = wait(&mut ranks).unwrap().iter().map(ExitStatus::code).collect();
        assert_eq!(codes, [Some(0), Some(3), Some(0)]);
    }

    #[test]
    fn a_port_is_free() {
        let port = free_port().unwrap();
        assert!(TcpListener::bind(("127.0.0.1", port)).is_ok());
    }
}
