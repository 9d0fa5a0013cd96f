//! What each arm of replay blocks asks of the library: the one place that knows the options.

use replay_runtime::{BlockOptions, EarlyStop, Keep, Rollout};
use tch::nn::VarStore;

use crate::law::Law;

/// A way to take the gradient of a rollout in this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// LibTorch's autograd over the whole graph.
    Plain,
    /// Replay blocks in the memory of one, as fast as that goes: their replays end early.
    Replay,
    /// Replay blocks as they are by default: they build their graph again, to its end.
    Full,
    /// Replays bring the tensors of recorded graphs, and run to the end.
    Refill,
    /// As `Replay`, and the last block's graph is kept.
    Keep1,
    /// All graphs are kept.
    KeepAll,
}

/// Every mode, with the name of its arm, in the order of the tables.
const MODES: [(&str, Mode); 7] = [
    ("plain", Mode::Plain),
    ("plain-again", Mode::Plain),
    ("replay", Mode::Replay),
    ("replay+full", Mode::Full),
    ("replay+refill", Mode::Refill),
    ("replay+keep1", Mode::Keep1),
    ("replay+keep-all", Mode::KeepAll),
];

impl Mode {
    /// The mode of that arm.
    pub(crate) fn named(arm: &str) -> Option<Self> {
        MODES.iter().find(|(name, _)| *name == arm).map(|&(_, mode)| mode)
    }

    /// The names of the arms.
    pub(crate) fn arms() -> impl Iterator<Item = &'static str> {
        MODES.iter().map(|&(name, _)| name)
    }

    /// A rollout in this mode.
    pub(crate) fn rollout(self, store: &VarStore) -> Rollout<'_> {
        let builder = Rollout::builder(store);
        match self {
            Self::Plain => unreachable!("a plain step has no rollout"),
            Self::Replay => builder,
            Self::Full => builder.early_stop(EarlyStop::Off),
            Self::Refill => builder.early_stop(EarlyStop::Always),
            Self::Keep1 => builder.keep_graphs(Keep::Last(1)),
            Self::KeepAll => builder.keep_graphs(Keep::Bytes(u64::MAX)),
        }
        .build()
    }

    /// A block in this mode.
    pub(crate) fn block(self, name: &str) -> BlockOptions {
        BlockOptions::new(name).early_stop(matches!(self, Self::Replay | Self::Keep1))
    }

    /// How the cost of a step is predicted.
    pub(crate) fn law(self) -> Law {
        let law = Law { graph_in_forward: true, kept: 0, stops_early: false };
        match self {
            Self::Plain | Self::KeepAll => Law { kept: i64::MAX, ..law },
            Self::Full | Self::Refill => law,
            Self::Replay => Law { stops_early: true, ..law },
            Self::Keep1 => Law { kept: 1, stops_early: true, ..law },
        }
    }
}
