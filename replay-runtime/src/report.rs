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
    /// Runs of a chain's step in the backward pass for its states alone, which were not stored; see
    /// [`Rollout::chain`](crate::Rollout::chain).
    pub advances: u64,
    /// Replays; fewer than forwards where an output's gradient was not needed, or a graph was kept.
    pub replays: u64,
    /// Of these, replays that were ended as soon as all that the gradient needs was there; see
    /// [`EarlyStop`](crate::EarlyStop).
    pub stopped: u64,
    /// Blocks that were differentiated without a replay, since their graph was kept or had saved nothing but inputs and
    /// variables; see [`Keep`](crate::Keep).
    pub kept: u64,
    /// Bytes that those graphs had saved, variables and inputs that are saved anyway not counted.
    pub bytes_kept: u64,
    /// Bytes that recorded graphs took themselves, without tensors: an estimate.
    pub bytes_graphs: u64,
    /// Bytes that inputs keep alive from the forward to the replay: each storage once and whole, however many views of it
    /// there are, in the row of the first block that keeps it; or, copied to the host, the values of each distinct view
    /// once. What a variable holds costs nothing. What a chain stores in its backward
    /// pass is not among them.
    pub bytes_saved: u64,
    /// Of these, bytes copied to host memory.
    pub bytes_on_host: u64,
    /// Seconds spent in forwards.
    pub forward_seconds: f64,
    /// Seconds spent running bodies again, for replays and advances.
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
    /// Bytes of gradients that the rollout copied instead of adding in place: 0 for ordinary models. It copies the
    /// first gradient of a parameter where that shares storage with another one (as those of parameters that a block
    /// puts together with `cat`), and old gradients that cannot hold the sum, of a narrower kind than
    /// [`accumulate_in`](crate::RolloutBuilder::accumulate_in) says or sparse. LibTorch's own copies of first gradients
    /// are not counted.
    pub gradient_bytes_copied: u64,
}

/// The counts while the rollout lives.
#[derive(Default)]
pub(crate) struct Ledger {
    blocks: BTreeMap<String, BlockReport>,
    gradient_bytes_copied: u64,
}

impl Ledger {
    fn of(&mut self, block: &str) -> &mut BlockReport {
        if !self.blocks.contains_key(block) {
            self.blocks.insert(block.to_owned(), BlockReport::default());
        }
        self.blocks.get_mut(block).expect("inserted above")
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

    /// The forward's graph was recorded, which takes so many bytes itself.
    pub(crate) fn recorded(&mut self, block: &str, bytes: u64) {
        self.of(block).bytes_graphs += bytes;
    }

    /// A graph that was kept is differentiated.
    pub(crate) fn kept(&mut self, block: &str, bytes: u64) {
        let report = self.of(block);
        report.kept += 1;
        report.bytes_kept += bytes;
    }

    pub(crate) fn replayed(&mut self, block: &str, time: Duration, stopped: bool) {
        let report = self.of(block);
        report.replays += 1;
        report.stopped += u64::from(stopped);
        report.replay_seconds += time.as_secs_f64();
    }

    pub(crate) fn advanced(&mut self, block: &str, time: Duration) {
        let report = self.of(block);
        report.advances += 1;
        report.replay_seconds += time.as_secs_f64();
    }

    pub(crate) fn differentiated(&mut self, block: &str, time: Duration) {
        self.of(block).backward_seconds += time.as_secs_f64();
    }

    pub(crate) fn gradients_copied(&mut self, bytes: u64) {
        self.gradient_bytes_copied += bytes;
    }

    pub(crate) fn report(&self, backward: Duration) -> RolloutReport {
        let blocks: Vec<_> = self.blocks.iter().map(|(name, report)| (name.clone(), report.clone())).collect();
        let mut total = BlockReport::default();
        for (_, block) in &blocks {
            total.forwards += block.forwards;
            total.advances += block.advances;
            total.replays += block.replays;
            total.stopped += block.stopped;
            total.kept += block.kept;
            total.bytes_kept += block.bytes_kept;
            total.bytes_graphs += block.bytes_graphs;
            total.bytes_saved += block.bytes_saved;
            total.bytes_on_host += block.bytes_on_host;
            total.forward_seconds += block.forward_seconds;
            total.replay_seconds += block.replay_seconds;
            total.backward_seconds += block.backward_seconds;
        }
        let gradient_bytes_copied = self.gradient_bytes_copied;
        RolloutReport { blocks, total, seconds: backward.as_secs_f64(), gradient_bytes_copied }
    }
}

impl fmt::Display for RolloutReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.blocks.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(5);
        writeln!(
            f,
            "{:width$}  forwards  advances  replays  stopped  kept  saved MB  on host MB  forward s  replay s  backward s",
            "block"
        )?;
        let total = ("total".to_owned(), self.total.clone());
        for (name, block) in self.blocks.iter().chain([&total]) {
            writeln!(
                f,
                "{name:width$}  {:8}  {:8}  {:7}  {:7}  {:4}  {:8.1}  {:10.1}  {:9.3}  {:8.3}  {:10.3}",
                block.forwards,
                block.advances,
                block.replays,
                block.stopped,
                block.kept,
                megabytes(block.bytes_saved),
                megabytes(block.bytes_on_host),
                block.forward_seconds,
                block.replay_seconds,
                block.backward_seconds,
            )?;
        }
        write!(f, "whole backward pass: {:.3} s", self.seconds)?;
        match self.gradient_bytes_copied {
            0 => Ok(()),
            bytes => write!(f, ", {:.1} MB of gradients copied", megabytes(bytes)),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
