//! What each arm of replay blocks asks of the library: the one place that knows the options.

use replay_runtime::{BlockOptions, Rollout};
use tch::nn::VarStore;

use crate::law::Law;

/// A way to take the gradient of a rollout in this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// LibTorch's autograd over the whole graph.
    Plain,
    /// Replay blocks as they are by default, and as fast as that goes.
    Replay,
    /// Replay blocks that build their graph again, to its end.
    Full,
}

/// Every mode that exists, with the name of its arm, in the order of the tables. A new one (`replay+keep1`,
/// `replay+keep-all`) has a line here and one in each `match` below.
const MODES: [(&str, Mode); 4] =
    [("plain", Mode::Plain), ("plain-again", Mode::Plain), ("replay", Mode::Replay), ("replay+full", Mode::Full)];

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
            Self::Replay | Self::Full => builder.build(),
        }
    }

    /// A block in this mode.
    pub(crate) fn block(self, name: &str) -> BlockOptions {
        let options = BlockOptions::new(name);
        match self {
            Self::Plain => unreachable!("a plain step has no blocks"),
            Self::Replay | Self::Full => options,
        }
    }

    /// How the cost of a step is predicted.
    pub(crate) fn law(self) -> Law {
        match self {
            Self::Plain => Law { graph_in_forward: true, kept: i64::MAX, stops_early: false },
            Self::Replay | Self::Full => Law { graph_in_forward: true, kept: 0, stops_early: false },
        }
    }
}
