//! What a rollout did: per block, how often it ran, what it kept, and where the time went.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The counts of one block, or of all of them.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BlockReport {
    /// Runs of the body in a forward; those of a block inside another block count each time the outer one runs.
    pub forwards: u64,
    /// Replays; fewer than forwards where an output's gradient was not needed.
    pub replays: u64,
    /// Bytes that inputs keep alive from the forward to the replay: each storage once and whole, however many views of it
    /// there are, in the row of the first block that keeps it; or, copied to the host, the values of each distinct view
    /// once. What a variable holds costs nothing.
    pub bytes_saved: u64,
    /// Of these, bytes copied to host memory.
    pub bytes_on_host: u64,
    /// Seconds spent in forwards.
    pub forward_seconds: f64,
    /// Seconds spent running bodies again.
    pub replay_seconds: f64,
    /// Seconds spent differentiating replayed bodies, replays of blocks inside included.
    pub backward_seconds: f64,
}

/// What one rollout did, from [`Rollout::backward`](crate::Rollout::backward). `Display` is a table.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RolloutReport {
    /// Per block, sorted by name; blocks of one name share a row.
    pub blocks: Vec<(String, BlockReport)>,
    /// The sum over all blocks.
    pub total: BlockReport,
    /// Seconds of the whole backward pass.
    pub seconds: f64,
}

/// The counts while the rollout lives.
#[derive(Default)]
pub(crate) struct Ledger(BTreeMap<String, BlockReport>);

impl Ledger {
    fn of(&mut self, block: &str) -> &mut BlockReport {
        if !self.0.contains_key(block) {
            self.0.insert(block.to_owned(), BlockReport::default());
        }
        self.0.get_mut(block).expect("inserted above")
    }

    pub(crate) fn forward(&mut self, block: &str, time: Duration) {
        let report = self.of(block);
        report.forwards += 1;
        report.forward_seconds += time.as_secs_f64();
    }

    pub(crate) fn saved(&mut self, block: &str, bytes: u64, on_host: bool) {
        let report = self.of(block);
        report.bytes_saved += bytes;
        report.bytes_on_host += if on_host { bytes } else { 0 };
    }

    pub(crate) fn replayed(&mut self, block: &str, time: Duration) {
        let report = self.of(block);
        report.replays += 1;
        report.replay_seconds += time.as_secs_f64();
    }

    pub(crate) fn differentiated(&mut self, block: &str, time: Duration) {
        self.of(block).backward_seconds += time.as_secs_f64();
    }

    pub(crate) fn report(&self, backward: Duration) -> RolloutReport {
        let blocks: Vec<_> = self.0.iter().map(|(name, report)| (name.clone(), report.clone())).collect();
        let mut total = BlockReport::default();
        for (_, block) in &blocks {
            total.forwards += block.forwards;
            total.replays += block.replays;
            total.bytes_saved += block.bytes_saved;
            total.bytes_on_host += block.bytes_on_host;
            total.forward_seconds += block.forward_seconds;
            total.replay_seconds += block.replay_seconds;
            total.backward_seconds += block.backward_seconds;
        }
        RolloutReport { blocks, total, seconds: backward.as_secs_f64() }
    }
}

impl fmt::Display for RolloutReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.blocks.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(5);
        writeln!(f, "{:width$}  forwards  replays  saved MB  on host MB  forward s  replay s  backward s", "block")?;
        let total = ("total".to_owned(), self.total.clone());
        for (name, block) in self.blocks.iter().chain([&total]) {
            writeln!(
                f,
                "{name:width$}  {:8}  {:7}  {:8.1}  {:10.1}  {:9.3}  {:8.3}  {:10.3}",
                block.forwards,
                block.replays,
                megabytes(block.bytes_saved),
                megabytes(block.bytes_on_host),
                block.forward_seconds,
                block.replay_seconds,
                block.backward_seconds,
            )?;
        }
        write!(f, "whole backward pass: {:.3} s", self.seconds)
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
