//! What a step should cost: the law, from the measured parts of a plain step.

use serde::{Deserialize, Serialize};

/// What a mode does, as far as its cost depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Law {
    /// Forwards record the graph, and cost `F`; or they do not, and cost `f`.
    pub(crate) graph_in_forward: bool,
    /// How many of the newest blocks are not replayed, since their graphs are kept.
    pub(crate) kept: i64,
    /// Replays end after the last tensor that the derivative needs.
    pub(crate) stops_early: bool,
}

/// Processor seconds of one block of a plain step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Parts {
    /// `f`: a forward without a graph.
    pub(crate) bare_forward: f64,
    /// `F`: a forward that records the graph.
    pub(crate) forward: f64,
    /// Of `F`, the part up to the last tensor that is saved for the derivative.
    pub(crate) until_last_save: f64,
    /// `b`: the backward.
    pub(crate) backward: f64,
}

impl Law {
    /// The predicted cost of a step of so many blocks over that of a plain one. With `levels` of blocks in blocks, each
    /// level inside replays once more with its outer block.
    pub(crate) fn ratio(self, parts: &Parts, blocks: i64, levels: u32) -> f64 {
        let kept = self.kept.min(blocks);
        let forward = if self.graph_in_forward { parts.forward } else { parts.bare_forward };
        let last = if self.stops_early { parts.until_last_save } else { parts.forward };
        let replayed = forward + f64::from(levels - 1) * parts.forward + last;
        let cost = count(blocks - kept) * replayed + count(kept) * parts.forward + count(blocks) * parts.backward;
        cost / (count(blocks) * (parts.forward + parts.backward))
    }
}

/// A count as a number to calculate with.
#[expect(clippy::cast_precision_loss, reason = "blocks are few")]
pub(crate) fn count(blocks: i64) -> f64 {
    blocks as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDEAL: Parts = Parts { bare_forward: 1.0, forward: 1.0, until_last_save: 0.5, backward: 2.0 };

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} != {b}");
    }

    #[test]
    fn a_replay_costs_a_third() {
        let law = Law { graph_in_forward: false, kept: 0, stops_early: false };
        close(law.ratio(&IDEAL, 8, 1), 4.0 / 3.0);
        close(law.ratio(&IDEAL, 8, 2), 5.0 / 3.0);
    }

    #[test]
    fn kept_graphs_are_not_replayed() {
        let law = |kept| Law { graph_in_forward: true, kept, stops_early: false };
        close(law(1).ratio(&IDEAL, 4, 1), 15.0 / 12.0);
        close(law(1).ratio(&IDEAL, 1, 1), 1.0);
        close(law(i64::MAX).ratio(&IDEAL, 8, 1), 1.0);
    }

    #[test]
    fn an_early_stop_leaves_the_tail_out() {
        close(Law { graph_in_forward: true, kept: 0, stops_early: true }.ratio(&IDEAL, 8, 1), 3.5 / 3.0);
    }

    #[test]
    fn a_forward_without_a_graph_is_cheaper() {
        let parts = Parts { bare_forward: 0.8, forward: 1.0, until_last_save: 1.0, backward: 2.0 };
        close(Law { graph_in_forward: false, kept: 0, stops_early: false }.ratio(&parts, 2, 1), 3.8 / 3.0);
        close(Law { graph_in_forward: true, kept: 0, stops_early: false }.ratio(&parts, 2, 1), 4.0 / 3.0);
    }
}
