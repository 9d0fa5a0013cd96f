//! Several processes that train one model: who they are, and what they tell each other before they do something together.
//!
//! Each operation begins with a record of fixed size from every rank. Ranks that are not about to do the same find out then,
//! all of them, before a byte of a tensor is sent; a rank that fails says so in its next record.

use std::cell::{Cell, RefCell};
use std::thread;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

mod builder;
mod env;
mod error;
mod header;
mod report;

pub use self::builder::DistBuilder;
pub use self::error::DistError;
pub use self::header::Operation;
pub(crate) use self::header::{Header, WORDS};
pub use self::report::report_failure;
use crate::ffi::{Group, ShimError};

/// How long a rank that has lost another waits for the last words of the others.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// This process among those that train together. Collective calls must be made by all ranks in the same order.
///
/// It belongs to the thread that made it.
///
/// ```no_run
/// use replay_runtime::dist::{Dist, DistError};
///
/// # fn main() -> Result<(), DistError> {
/// let dist = Dist::from_env()?; // under torchrun, or one process
/// let steps = dist.agree_steps(120 + dist.rank() as u64)?;
/// println!("rank {} of {}: {steps} steps", dist.rank(), dist.world());
/// dist.shutdown()
/// # }
/// ```
#[derive(Debug)]
pub struct Dist {
    rank: usize,
    world: usize,
    local_rank: usize,
    timeout: Duration,
    /// From where parameters and gradients are sent.
    payload: Device,
    /// `None` in a world of one.
    group: Option<Group>,
    /// The names of units by number, for messages.
    units: RefCell<Vec<String>>,
    sequence: Cell<u64>,
    first_failure: RefCell<Option<String>>,
    done: Cell<bool>,
}

impl Dist {
    /// The group that torchrun has started: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, and, where
    /// torchrun serves the store, `TORCHELASTIC_USE_AGENT_STORE`.
    ///
    /// # Errors
    /// [`DistError::Environment`], and as for [`connect`](DistBuilder::connect).
    pub fn from_env() -> Result<Self, DistError> {
        Self::builder_from_env()?.connect()
    }

    /// [`from_env`](Self::from_env) with choices.
    ///
    /// # Errors
    /// [`DistError::Environment`].
    pub fn builder_from_env() -> Result<DistBuilder, DistError> {
        env::read(&|name| std::env::var(name).ok())
    }

    /// Rank `rank` of `world`, counted from 0.
    pub fn builder(rank: usize, world: usize) -> DistBuilder {
        DistBuilder::new(rank, world)
    }

    /// A world of one.
    #[must_use]
    pub fn single() -> Self {
        DistBuilder::new(0, 1).begin(None)
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The number of this process on its machine.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Waits for all ranks. Collective.
    ///
    /// # Errors
    /// See [`DistError`].
    pub fn barrier(&self) -> Result<(), DistError> {
        self.enter(Operation::Barrier, None, 0, [0; WORDS]).map(drop)
    }

    /// The least of all ranks' numbers of steps: so many can all of them do. Collective.
    ///
    /// # Errors
    /// See [`DistError`].
    pub fn agree_steps(&self, steps: u64) -> Result<u64, DistError> {
        let mut words = [0; WORDS];
        words[..8].copy_from_slice(&steps.to_le_bytes());
        let records = self.enter(Operation::AgreeSteps, None, 0, words)?;
        let least = records.iter().map(|record| record.words[..8].try_into().map_or(0, u64::from_le_bytes)).min();
        Ok(least.unwrap_or(steps))
    }

    /// Every rank's number, by rank: of losses, seconds or bytes. Collective.
    ///
    /// # Errors
    /// See [`DistError`].
    pub fn all_gather(&self, number: f64) -> Result<Vec<f64>, DistError> {
        let mut words = [0; WORDS];
        words[..8].copy_from_slice(&number.to_le_bytes());
        let records = self.enter(Operation::AllGather, None, 0, words)?;
        Ok(records.iter().map(|record| record.words[..8].try_into().map_or(f64::NAN, f64::from_le_bytes)).collect())
    }

    /// Ends the group once all ranks have come here. A process that ends without it looks to the others like one that was
    /// killed. Collective.
    ///
    /// # Errors
    /// See [`DistError`]: a rank that wants something else is named.
    pub fn shutdown(self) -> Result<(), DistError> {
        self.enter(Operation::Shutdown, None, 0, [0; WORDS])?;
        self.done.set(true);
        Ok(())
    }

    /// Tells the other ranks that this one has failed: their next operation is an error that says so. Waits for them to come
    /// to it.
    pub(crate) fn abort(&self, why: &str) {
        let Some(group) = self.group.as_ref().filter(|_| self.first_failure.borrow().is_none()) else { return };
        let why = why.lines().next().unwrap_or("no reason");
        *self.first_failure.borrow_mut() = Some(why.to_owned());
        // Whoever is not reached hears of it by the note.
        let _ = group.note(&last_word_of(self.rank), why);
        let header = self.header(Operation::Abort, None, 0, [0; WORDS], why);
        let _ = self.records(group, &header);
    }

    /// Leaves a text for the others, of what this rank says in its next record.
    pub(crate) fn say(&self, text: &str) {
        if let Some(group) = &self.group {
            let _ = group.note(&said_by(self.rank, self.sequence.get()), text.lines().next().unwrap_or_default());
        }
    }

    /// The text that another rank has left before its last record.
    pub(crate) fn said(&self, rank: usize) -> String {
        let key = said_by(rank, self.sequence.get() - 1);
        let note = self.group.as_ref().and_then(|group| group.read_note(&key).ok().flatten());
        note.unwrap_or_else(|| "it does not say why".to_owned())
    }

    /// Names for messages; the same on all ranks.
    pub(crate) fn name_units(&self, names: Vec<String>) {
        *self.units.borrow_mut() = names;
    }

    pub(crate) fn payload(&self) -> Device {
        self.payload
    }

    pub(crate) fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Begins an operation: every rank's record, if all are about to do the same.
    pub(crate) fn enter(
        &self,
        operation: Operation,
        unit: Option<u32>,
        bytes: u64,
        words: [u8; WORDS],
    ) -> Result<Vec<Header>, DistError> {
        if let Some(first) = &*self.first_failure.borrow() {
            return Err(DistError::Poisoned { first: first.clone() });
        }
        let own = self.header(operation, unit, bytes, words, "");
        self.sequence.set(self.sequence.get() + 1);
        let Some(group) = &self.group else { return Ok(vec![own]) };
        let records = self.records(group, &own).map_err(|error| self.lost(operation, unit, error))?;
        self.check(&own, &records).map_err(|error| self.poison(error))?;
        Ok(records.into_iter().flatten().collect())
    }

    fn header(&self, operation: Operation, unit: Option<u32>, bytes: u64, words: [u8; WORDS], text: &str) -> Header {
        Header { sequence: self.sequence.get(), operation, unit, bytes, words, text: text.to_owned() }
    }

    fn records(&self, group: &Group, own: &Header) -> Result<Vec<Option<Header>>, ShimError> {
        let size = i64::try_from(header::SIZE).expect("a few bytes");
        let all =
            Tensor::zeros([size * i64::try_from(self.world).expect("processes are few")], (Kind::Uint8, Device::Cpu));
        group.all_gather(&all, &Tensor::from_slice(&own.encode()))?;
        let bytes: Vec<u8> = Vec::try_from(&all).expect("a vector of bytes");
        Ok(bytes.chunks_exact(header::SIZE).map(|record| Header::decode(record.try_into().ok()?)).collect())
    }

    /// Whether all ranks are about to do the same as this one.
    fn check(&self, own: &Header, records: &[Option<Header>]) -> Result<(), DistError> {
        let failed = |(rank, record): (usize, &Option<Header>)| {
            record
                .as_ref()
                .filter(|record| record.operation == Operation::Abort)
                .map(|record| (rank, record.text.clone()))
        };
        if let Some((rank, text)) = records.iter().enumerate().find_map(failed) {
            let note = self.group.as_ref().and_then(|group| group.read_note(&last_word_of(rank)).ok().flatten());
            let text = note.unwrap_or(text);
            let (operation, unit) = (own.operation, self.unit_name(own.unit));
            return Err(DistError::Peer { rank, text, operation, unit });
        }
        if records.iter().all(|record| record.as_ref().is_some_and(|record| record.agrees(own))) {
            return Ok(());
        }
        let ranks = records.iter().map(|record| self.describe(record.as_ref())).collect();
        Err(DistError::Mismatch { sequence: own.sequence, ranks })
    }

    fn describe(&self, record: Option<&Header>) -> String {
        let Some(record) = record else { return "not a record of this library".to_owned() };
        let unit = self.unit_name(record.unit).map_or_else(String::new, |unit| format!(" of `{unit}`"));
        let bytes = if record.bytes == 0 { String::new() } else { format!(" with {} bytes", record.bytes) };
        format!("{}{unit}{bytes} at {}", record.operation, record.sequence)
    }

    fn unit_name(&self, unit: Option<u32>) -> Option<String> {
        let unit = unit?;
        let units = self.units.borrow();
        let name = usize::try_from(unit).ok().and_then(|unit| units.get(unit));
        Some(name.map_or_else(|| format!("unit {unit}"), Clone::clone))
    }

    /// LibTorch gave an operation up: says which ranks have said something since, and what.
    pub(crate) fn lost(&self, operation: Operation, unit: Option<u32>, source: ShimError) -> DistError {
        let (mut silent, mut reports) =
            ((0..self.world).filter(|rank| *rank != self.rank).collect::<Vec<_>>(), Vec::new());
        if let Some(group) = &self.group {
            let at = format!("{operation} failed at {}", self.sequence.get());
            let _ = group.note(&last_word_of(self.rank), &at);
            let started = Instant::now();
            while !silent.is_empty() && started.elapsed() < LAST_WORDS {
                silent.retain(|&rank| match group.read_note(&last_word_of(rank)) {
                    Ok(Some(text)) => {
                        reports.push((rank, text));
                        false
                    }
                    _ => true,
                });
                thread::sleep(Duration::from_millis(20));
            }
        }
        reports.sort();
        self.poison(DistError::Lost {
            rank: self.rank,
            operation,
            unit: self.unit_name(unit),
            silent,
            reports,
            timeout: self.timeout,
            source: Box::new(source.into()),
        })
    }

    /// From now on every call fails.
    fn poison(&self, error: DistError) -> DistError {
        self.first_failure
            .borrow_mut()
            .get_or_insert_with(|| error.to_string().lines().next().unwrap_or_default().to_owned());
        error
    }
}

impl Drop for Dist {
    /// No collective: other ranks may be anywhere.
    fn drop(&mut self) {
        if let Some(group) = self.group.as_ref().filter(|_| !self.done.get() && self.first_failure.borrow().is_none()) {
            let how = if thread::panicking() { "it panicked" } else { "it ended without `shutdown`" };
            let _ = group.note(&last_word_of(self.rank), how);
        }
    }
}

fn last_word_of(rank: usize) -> String {
    format!("last/{rank}")
}

fn said_by(rank: usize, sequence: u64) -> String {
    format!("said/{rank}/{sequence}")
}
