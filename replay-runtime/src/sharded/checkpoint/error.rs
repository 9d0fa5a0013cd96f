//! What can go wrong with a checkpoint.

use std::io;
use std::path::{Path, PathBuf};

use crate::dist::DistError;
use crate::torch_error::TorchError;

/// A checkpoint that cannot be written or read.
///
/// A failure of one process is one on all of them. After any but [`Dist`](Self::Dist) they can go on: nothing has been changed, and
/// nothing is left where the checkpoint was to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// There is something of that name already.
    #[error("`{}` exists already\nsave under another name, or remove it first", .path.display())]
    Exists {
        /// The name.
        path: PathBuf,
    },

    /// There is no complete checkpoint of that name.
    #[error("there is no complete checkpoint at `{}`: it has no {}\na save that was interrupted leaves nothing of that name, and perhaps a folder `.tmp` beside it", .path.display(), .file)]
    Missing {
        /// The name.
        path: PathBuf,
        /// What would be there.
        file: &'static str,
    },

    /// The file system failed.
    #[error("could not {action} `{}`: {source}", .path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// To which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },

    /// It is not what the library has written.
    #[error("`{}` {problem}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// It is of another model, or another optimizer.
    #[error("`{}` does not fit: {difference}", .path.display())]
    Differs {
        /// The checkpoint.
        path: PathBuf,
        /// Where.
        difference: String,
    },

    /// The optimizer is of another store.
    #[error(
        "the optimizer's `{parameter}` is not this store's: it was made for another store\nmake it with `Optimizer::new(&sharded, ..)` after the store"
    )]
    Optimizer {
        /// The first variable that is another one.
        parameter: String,
    },

    /// A rollout of the store lives, or was forgotten.
    #[error("a rollout of this store lives: parameter `{parameter}` is whole\nsave and load between rollouts")]
    Open {
        /// A parameter that is whole.
        parameter: String,
    },

    /// A variable of a kind that the format has not.
    #[error("variable `{variable}` is of kind {kind}, which the safetensors format has not")]
    Kind {
        /// The variable.
        variable: String,
        /// Its kind.
        kind: String,
    },

    /// Processes that are not at the same place of the training.
    #[error(
        "rank {rank} has another {what} than rank 0\nall ranks must save the same step, with optimizers that have done the same"
    )]
    Ranks {
        /// The first rank that differs.
        rank: usize,
        /// In what.
        what: &'static str,
    },

    /// Another process could not do its part.
    #[error("rank {rank} could not do its part: {text}")]
    Peer {
        /// The rank.
        rank: usize,
        /// What it said.
        text: String,
    },

    /// The processes disagree, or one is gone.
    #[error(transparent)]
    Dist(#[from] DistError),

    /// LibTorch failed on this process.
    #[error("could not {action}: {source}")]
    Torch {
        /// What was being done.
        action: &'static str,
        /// What LibTorch said.
        source: Box<TorchError>,
    },
}

pub(super) type Result<T> = std::result::Result<T, CheckpointError>;

pub(super) fn io<'p>(action: &'static str, path: &'p Path) -> impl Fn(io::Error) -> CheckpointError + 'p {
    move |source| CheckpointError::Io { action, path: path.to_owned(), source }
}

pub(super) fn torch<E: Into<TorchError>>(action: &'static str) -> impl Fn(E) -> CheckpointError {
    move |error| CheckpointError::Torch { action, source: Box::new(error.into()) }
}

pub(super) fn damaged(path: &Path, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Damaged { path: path.to_owned(), problem: problem.into() }
}

pub(super) fn differs(path: &Path, difference: impl Into<String>) -> CheckpointError {
    CheckpointError::Differs { path: path.to_owned(), difference: difference.into() }
}
