//! Tensors that have several names in a store, and tensors that share memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use tch::Tensor;

use super::error::ShardError;
use crate::ffi;

/// Who sees to it that a variable is whole when it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner<'n> {
    Unit(&'n str),
    Resident,
    Ignored,
    /// It is not trained, and whole everywhere.
    Buffer,
}

impl Owner<'_> {
    fn is_cut(self) -> bool {
        matches!(self, Self::Unit(_) | Self::Resident)
    }
}

impl fmt::Display for Owner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unit(name) => write!(f, "in unit `{name}`"),
            Self::Resident => f.write_str("in no unit"),
            Self::Ignored => f.write_str("ignored"),
            Self::Buffer => f.write_str("not trained"),
        }
    }
}

/// One name of a store.
#[derive(Clone, Copy)]
struct Named<'n> {
    name: &'n str,
    owner: Owner<'n>,
}

/// Whether all names of a tensor have one owner, and nothing that is to be cut, or is `moved` to another device, shares its memory
/// with another variable.
pub(super) fn check<'n>(
    variables: &'n [(String, Tensor)],
    moved: bool,
    owner: impl Fn(&str, &Tensor) -> Result<Owner<'n>, ShardError>,
) -> Result<(), ShardError> {
    // The tensors live as long as these maps: no address is that of another one by now.
    let (mut tensors, mut storages) = (HashMap::new(), HashMap::new());
    for (name, tensor) in variables {
        let this = Named { name, owner: owner(name, tensor)? };
        match tensors.entry(ffi::identity(tensor)) {
            Entry::Vacant(entry) => drop(entry.insert(this)),
            Entry::Occupied(entry) if entry.get().owner != this.owner => return Err(tied(entry.get(), &this)),
            Entry::Occupied(_) => continue,
        }
        let Some(storage) = ffi::storage(tensor) else { continue };
        let first = *storages.entry(storage).or_insert(this);
        if first.name != this.name && (moved || first.owner.is_cut() || this.owner.is_cut()) {
            let (first, second) = (first.name.to_owned(), this.name.to_owned());
            return Err(ShardError::SharedMemory { first, second });
        }
    }
    Ok(())
}

fn tied(first: &Named<'_>, second: &Named<'_>) -> ShardError {
    ShardError::Tied {
        first: first.name.to_owned(),
        first_owner: first.owner.to_string(),
        second: second.name.to_owned(),
        second_owner: second.owner.to_string(),
    }
}
