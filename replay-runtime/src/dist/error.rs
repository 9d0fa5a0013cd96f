//! Everything that can go wrong between processes.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::time::Duration;

use super::header::Operation;
use crate::torch_error::TorchError;

/// A failure of what several processes do together.
///
/// After one of [`Mismatch`](Self::Mismatch), [`Peer`](Self::Peer) and [`Lost`](Self::Lost) the group is of no more use: every
/// further call is [`Poisoned`](Self::Poisoned). The process should end with a code other than 0, so that the launcher ends, or
/// restarts, the others.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DistError {
    /// A variable of the launcher is missing or is not what it should be.
    #[error(
        "the environment variable {variable} {problem}\nlaunch the program by `torchrun` or `cargo xtask sharded`, or use `Dist::builder`"
    )]
    Environment {
        /// The variable.
        variable: &'static str,
        /// What is wrong with it.
        problem: String,
    },

    /// Rank and world do not fit each other.
    #[error("rank {rank} is not one of {world} ranks\nranks count from 0, and there must be at least one")]
    Rank {
        /// The rank.
        rank: usize,
        /// How many ranks there are said to be.
        world: usize,
    },

    /// More than one rank, and no store is given.
    #[error(
        "no place is given where {world} ranks can find each other\ngive the builder `tcp(host, port)` or `file(path)`, the same on all ranks"
    )]
    NoStore {
        /// How many ranks there are.
        world: usize,
    },

    /// The ranks did not find each other.
    #[error(
        "rank {rank} of {world} found no group within {wait:?}: {source}\nare all ranks running, and does `{place}` lead to the same one from each of them?{network}"
    )]
    Connect {
        /// This rank.
        rank: usize,
        /// How many ranks there are.
        world: usize,
        /// How long it waited.
        wait: Duration,
        /// Where it looked.
        place: String,
        /// What to look at where the ranks are on several machines; else empty.
        network: String,
        /// What LibTorch said.
        source: Box<TorchError>,
    },

    /// The ranks were not about to do the same. Nothing was sent.
    #[error("the ranks do not do the same at operation {sequence}: {}\nall ranks must run the same blocks in the same order, with as many steps", list(.ranks))]
    Mismatch {
        /// How many operations came before, by this rank's count.
        sequence: u64,
        /// What each rank was about to do, by rank.
        ranks: Vec<String>,
    },

    /// Another rank has failed and said so.
    #[error("rank {rank} has failed: {text}\nthis rank was at {operation}{}", of(.unit.as_ref()))]
    Peer {
        /// The rank that failed.
        rank: usize,
        /// What it said.
        text: String,
        /// What this rank was about to do.
        operation: Operation,
        /// The unit it was to be done with.
        unit: Option<String>,
    },

    /// Another rank is gone, or did not come in time.
    #[error("{operation}{} failed on rank {rank}: {}", of(.unit.as_ref()), lost(.silent, .reports, *.timeout, .source))]
    Lost {
        /// This rank.
        rank: usize,
        /// What was under way.
        operation: Operation,
        /// The unit it was done with.
        unit: Option<String>,
        /// Ranks of which nothing was heard since.
        silent: Vec<usize>,
        /// What other ranks left as their last word.
        reports: Vec<(usize, String)>,
        /// How long an operation may take.
        timeout: Duration,
        /// What LibTorch said.
        source: Box<TorchError>,
    },

    /// The group has failed before.
    #[error(
        "the group of processes has failed before: {first}\nend this process, so that the launcher ends or restarts all of them"
    )]
    Poisoned {
        /// The first failure.
        first: String,
    },

    /// The ranks were not built alike.
    #[error(
        "rank {rank} is not built as rank 0: {difference}\nall ranks must build the same model and the same units, from the same program"
    )]
    Build {
        /// The first rank that differs.
        rank: usize,
        /// Where.
        difference: String,
    },

    /// Somebody has given a sharded parameter other data.
    #[error(
        "parameter `{parameter}` is not the piece that its store has made of it\nchange it in place, or build the store after it is given its data"
    )]
    Replaced {
        /// The parameter.
        parameter: String,
    },

    /// Something was computed from a parameter while this process had only its piece of it.
    #[error(
        "parameter `{parameter}` is used outside of the blocks of its unit `{unit}`, where it is only this rank's piece\nleave it to no unit: then it is whole while the rollout lives"
    )]
    Piece {
        /// The parameter.
        parameter: String,
        /// Its unit.
        unit: String,
    },

    /// A choice for rollouts that sharded stores have made already.
    #[error(
        "`accumulate_in` is for stores that are not sharded\nleave it out: gradients of pieces are added up in f32, and in f64 for f64, whatever their kind"
    )]
    AccumulateIn,

    /// A rollout has two sharded stores.
    #[error(
        "a rollout can have one sharded store\nput all variables into one `VarStore` (`VarStore::merge`), and shard that"
    )]
    SecondStore,

    /// A backward pass in the middle of another one over the same store.
    #[error(
        "a backward pass over this sharded store is under way, in which another one was begun\ntake the inner gradient with `Tensor::run_backward`, or over a store of its own"
    )]
    Nested,

    /// Somebody has written to a parameter while it was whole.
    #[error(
        "parameter `{parameter}` was written to while a rollout lived, and what was written is lost: it was this rank's copy of the whole\ndrop all rollouts of the store, also those that only evaluate, before the optimizer's step"
    )]
    Written {
        /// The parameter.
        parameter: String,
    },

    /// LibTorch failed on this rank alone, before anything was sent.
    #[error("could not {action}: {source}")]
    Torch {
        /// What was being done.
        action: &'static str,
        /// What LibTorch said.
        source: Box<TorchError>,
    },
}

fn of(unit: Option<&String>) -> String {
    unit.map_or_else(String::new, |unit| format!(" of `{unit}`"))
}

fn list(ranks: &[String]) -> String {
    let ranks = ranks.iter().enumerate().map(|(rank, what)| format!("rank {rank}: {what}"));
    ranks.collect::<Vec<_>>().join("; ")
}

fn lost(silent: &[usize], reports: &[(usize, String)], timeout: Duration, source: &TorchError) -> String {
    let mut text = String::new();
    for (rank, report) in reports {
        let _ = write!(text, "rank {rank} said: {report}; ");
    }
    if !silent.is_empty() {
        let ranks = silent.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let _ = write!(text, "nothing was heard of rank {ranks}; ");
    }
    let _ = write!(text, "{source}\na rank has ended, or did not come within {timeout:?}");
    text
}

impl fmt::Debug for DistError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        match self.source() {
            Some(source) => write!(f, "\ncaused by: {source:?}"),
            None => Ok(()),
        }
    }
}
