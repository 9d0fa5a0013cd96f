//! Checkpoints: of each process's pieces, for going on with any number of processes, and of whole parameters, for everybody else.

mod error;
mod file;
mod full;
mod load;
mod meta;
mod save;

pub use self::error::CheckpointError;
use self::error::Result;
pub use self::load::Loaded;
use super::{Param, Sharded};
use crate::dist::{Operation, WORDS};
use crate::ffi;
use crate::optim::Optimizer;

/// What a rank says of its part, beside whether it has done it.
type Words = [u8; WORDS - 1];

impl Sharded<'_> {
    /// All ranks have done their part, and what they say of it, in rank order; or none goes on. The group stays usable.
    fn all_done<const N: usize>(&self, operation: Operation, own: Result<[u64; N]>) -> Result<Vec<[u64; N]>> {
        let mut words = [0; WORDS];
        match &own {
            Ok(numbers) => {
                for (word, number) in words[1..].chunks_exact_mut(8).zip(numbers) {
                    word.copy_from_slice(&number.to_le_bytes());
                }
            }
            Err(error) => {
                words[0] = 1;
                self.dist.say(&error.to_string());
            }
        }
        let records = self.dist.enter(operation, None, 0, words)?;
        own?;
        if let Some(rank) = records.iter().position(|record| record.words[0] != 0) {
            return Err(CheckpointError::Peer { rank, text: self.dist.said(rank) });
        }
        Ok(records.iter().map(|record| numbers(record.words[1..].try_into().expect("the rest of them"))).collect())
    }

    fn param(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|param| param.name == name)
    }

    /// Whether an optimizer trains this store's own tensors.
    fn check_own(&self, optimizer: &Optimizer) -> Result<()> {
        let whole = |name: &str| self.whole.iter().find(|(other, _)| other == name).map(|(_, tensor)| tensor);
        let ours = |name: &str| self.param(name).map(|param| &param.tensor).or_else(|| whole(name));
        let same = |name: &&str| {
            let (theirs, ours) = (optimizer.tensor(name), ours(name));
            theirs.zip(ours).is_some_and(|(theirs, ours)| ffi::identity(theirs) == ffi::identity(ours))
        };
        match optimizer.names().find(|name| !same(name)) {
            Some(parameter) => Err(CheckpointError::Optimizer { parameter: parameter.to_owned() }),
            None => Ok(()),
        }
    }

    /// Nothing is whole that comes and goes.
    fn check_closed(&self) -> Result<()> {
        let open = self.units.iter().find(|unit| unit.open.get() > 0 && !unit.params.is_empty());
        match open {
            Some(unit) => Err(CheckpointError::Open { parameter: self.params[unit.params[0]].name.clone() }),
            None => Ok(()),
        }
    }
}

fn numbers<const N: usize>(words: Words) -> [u64; N] {
    std::array::from_fn(|i| u64::from_le_bytes(words[8 * i..8 * i + 8].try_into().expect("eight bytes")))
}
