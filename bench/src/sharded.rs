//! Sharded training beside PyTorch's FSDP2, on the same shapes, in turn.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::launch;
use crate::sharded_rank::Shape;

/// What to compare.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Options {
    /// A Python with PyTorch.
    #[arg(long, requires = "peers")]
    python: Option<PathBuf>,
    /// The script that runs FSDP2 under torchrun.
    #[arg(long, requires = "python")]
    peers: Option<PathBuf>,
    #[command(flatten)]
    shape: Shape,
    /// Runs of each.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Numbers of processes, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    worlds: Vec<usize>,
}

/// What rank 0 of either says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Of a step, the median.
    pub(crate) seconds: f64,
    /// What each rank's memory has grown by, at its peak, in MiB.
    pub(crate) peak_mb: Vec<f64>,
    pub(crate) loss: f64,
}

impl Answer {
    fn peak(&self) -> f64 {
        self.peak_mb.iter().copied().fold(0.0, f64::max)
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    for &world in &options.worlds {
        let (mut times, mut peaks) = (Vec::new(), Vec::new());
        for round in 1..=options.rounds {
            let theirs = match (&options.python, &options.peers) {
                (Some(python), Some(peers)) => Some(fsdp(python, peers, &options.shape, world)?),
                _ => None,
            };
            let ours = ours(&options.shape, world)?;
            println!("world {world}, round {round}: {}", line("ours", &ours));
            let Some(theirs) = theirs else { continue };
            println!("world {world}, round {round}: {}", line("FSDP2", &theirs));
            times.push(ours.seconds / theirs.seconds);
            peaks.push(ours.peak() / theirs.peak());
        }
        if !times.is_empty() {
            let (time, peak) = (median(&mut times), median(&mut peaks));
            println!("world {world}: ours over FSDP2, median of {}: time {time:.3}, peak {peak:.3}", options.rounds);
        }
    }
    Ok(())
}

fn line(arm: &str, answer: &Answer) -> String {
    let peaks: Vec<_> = answer.peak_mb.iter().map(|peak| format!("{peak:.0}")).collect();
    format!("{arm} {:.3} s a step, {} MiB, loss {:.6}", answer.seconds, peaks.join(" and "), answer.loss)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn fsdp(python: &Path, script: &Path, shape: &Shape, world: usize) -> Result<Answer> {
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", &world.to_string()]);
    command.arg(script).args(shape.values());
    command.env_remove("LD_LIBRARY_PATH").env("OMP_NUM_THREADS", "1");
    launch::answer(&mut command)
}

fn ours(shape: &Shape, world: usize) -> Result<Answer> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let program = std::env::current_exe().context("this program has no path")?;
    let rank = |rank: usize| {
        let mut command = Command::new(&program);
        command.arg("sharded-rank").args(shape.options());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("OMP_NUM_THREADS", "1");
        command
    };
    let others = (1..world).map(|other| rank(other).stdout(Stdio::null()).spawn()).collect::<Result<Vec<_>, _>>();
    let answer = launch::answer(&mut rank(0));
    for mut other in others.context("this program cannot be started again")? {
        ensure!(other.wait()?.success(), "a rank has failed");
    }
    answer
}
