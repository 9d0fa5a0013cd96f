//! The watch over the stores' variables between a block's forward and its replay.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::rc::Rc;

use tch::Tensor;

use crate::ffi::{self, Fingerprint, ShimError, TensorList};
use crate::store::{self, Store};

/// One variable of a store, beside its tensor.
struct Variable {
    name: String,
    /// Not trainable, as the statistics of normalisation layers. Its values are compared instead of its version:
    /// normalisation kernels write them without a new one.
    buffer: bool,
}

/// The variables of all stores, tied ones once.
struct Variables {
    items: Vec<Variable>,
    tensors: TensorList,
    buffers: bool,
    /// Sorted.
    identities: Vec<usize>,
}

impl Variables {
    fn collect(stores: &[&dyn Store]) -> Self {
        let mut named: Vec<_> = stores.iter().flat_map(|store| store.named()).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let trainable: HashSet<usize> =
            stores.iter().flat_map(|store| store.trainable()).map(|tensor| ffi::identity(&tensor)).collect();
        let mut seen = HashSet::new();
        let once = |(_, tensor): &(_, Tensor)| tensor.defined() && seen.insert(ffi::identity(tensor));
        let (items, tensors): (Vec<_>, Vec<_>) = named
            .into_iter()
            .filter(once)
            .map(|(name, tensor)| {
                // Values of a sparse one cannot be put back in place.
                let strided = tensor.numel() == 0 || ffi::storage(&tensor).is_some();
                let buffer = !trainable.contains(&ffi::identity(&tensor)) && strided;
                (Variable { name, buffer }, Some(tensor))
            })
            .unzip();
        let buffers = items.iter().any(|variable| variable.buffer);
        let mut identities: Vec<_> = seen.into_iter().collect();
        identities.sort_unstable();
        Self { items, tensors: TensorList::new(tensors), buffers, identities }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.iter().flatten()
    }
}

/// The variables as they were when a block ran.
pub(crate) struct Snapshot {
    variables: Rc<Variables>,
    count: usize,
    /// How often something else than a block had changed them by then.
    generation: u64,
    fingerprints: Vec<Fingerprint>,
    /// Copies of the buffers' values; `None` for the others. Snapshots share those that did not change in between.
    values: TensorList,
    /// Sorted.
    storages: Vec<usize>,
    storage_set: OnceCell<ffi::StorageSet>,
}

/// A variable that is not what it was.
pub(crate) struct Change {
    pub(crate) variable: String,
    pub(crate) what: &'static str,
    /// Only the values, and those of a buffer.
    pub(crate) updates_buffer: bool,
}

impl Snapshot {
    /// Takes one, sharing with `last` what has not changed; what has, a block changed if `by_block`.
    pub(crate) fn take(stores: &[&dyn Store], last: Option<&Rc<Self>>, by_block: bool) -> Result<Rc<Self>, ShimError> {
        let count = store::count(stores);
        match last {
            Some(last) if last.count == count && by_block => last.after_block(),
            Some(last) if last.count == count => match last.differing(0, true)? {
                None => Ok(Rc::clone(last)),
                Some(_) => last.renew(last.generation + u64::from(last.change()?.is_some())),
            },
            _ => {
                let variables = Rc::new(Variables::collect(stores));
                Self::of(variables, count, last.map_or(0, |last| last.generation + 1), |_| None)
            }
        }
    }

    /// The variables after a block that may update buffers, which this snapshot was taken before.
    pub(crate) fn after_block(self: &Rc<Self>) -> Result<Rc<Self>, ShimError> {
        if self.differing(0, true)?.is_none() { Ok(Rc::clone(self)) } else { self.renew(self.generation) }
    }

    /// The same values, and the versions as they are now: a buffer may have been given the same values again.
    pub(crate) fn refreshed(self: &Rc<Self>) -> Result<Rc<Self>, ShimError> {
        if !self.variables.buffers {
            return Ok(Rc::clone(self));
        }
        for (variable, tensor, before, _) in self.items() {
            if variable.buffer && ffi::fingerprint(tensor)?.version != before.version {
                return self.renew(self.generation);
            }
        }
        Ok(Rc::clone(self))
    }

    fn renew(&self, generation: u64) -> Result<Rc<Self>, ShimError> {
        let (tensors, values): (Vec<_>, Vec<_>) = self.variables.tensors().zip(self.values.iter()).unzip();
        let old = |i: usize| values[i].filter(|value| ffi::keeps_values(tensors[i], value, &self.fingerprints[i]));
        Self::of(Rc::clone(&self.variables), self.count, generation, old)
    }

    /// Reads the variables. `old` gives the values of those that have not changed.
    fn of<'t>(
        variables: Rc<Variables>,
        count: usize,
        generation: u64,
        old: impl Fn(usize) -> Option<&'t Tensor>,
    ) -> Result<Rc<Self>, ShimError> {
        let fingerprints = variables.tensors().map(ffi::fingerprint).collect::<Result<_, _>>()?;
        let values = variables.items.iter().zip(variables.tensors()).enumerate().map(|(i, (variable, tensor))| {
            let value = || old(i).map_or_else(|| ffi::copy(tensor), |old| Ok(old.shallow_clone()));
            variable.buffer.then(value).transpose()
        });
        let values = TensorList::new(values.collect::<Result<_, _>>()?);
        let mut storages: Vec<_> = variables.tensors().filter_map(ffi::storage).collect();
        storages.sort_unstable();
        let storage_set = OnceCell::new();
        Ok(Rc::new(Self { variables, count, generation, fingerprints, values, storages, storage_set }))
    }

    fn items(&self) -> impl Iterator<Item = (&Variable, &Tensor, &Fingerprint, Option<&Tensor>)> {
        let variables = self.variables.items.iter().zip(self.variables.tensors());
        let state = self.fingerprints.iter().zip(self.values.iter());
        variables.zip(state).map(|((variable, tensor), (print, value))| (variable, tensor, print, value))
    }

    /// The first variable, not before `from`, that is not as in the snapshot; of buffers, with `versions`, also by
    /// their versions.
    fn differing(&self, from: usize, versions: bool) -> Result<Option<usize>, ShimError> {
        ffi::differing(&self.variables.tensors, &self.values, &self.fingerprints, from, versions)
    }

    /// The first variable that differs from the snapshot.
    pub(crate) fn change(&self) -> Result<Option<Change>, ShimError> {
        self.find(|_| true)
    }

    /// The first one of which more differs than a buffer's values.
    pub(crate) fn change_beside_buffers(&self) -> Result<Option<Change>, ShimError> {
        self.find(|change| !change.updates_buffer)
    }

    fn find(&self, wanted: impl Fn(&Change) -> bool) -> Result<Option<Change>, ShimError> {
        let mut from = 0;
        while let Some(i) = self.differing(from, false)? {
            let change = self.describe(i)?;
            if wanted(&change) {
                return Ok(Some(change));
            }
            from = i + 1;
        }
        Ok(None)
    }

    /// What of variable `i` differs, which does.
    fn describe(&self, i: usize) -> Result<Change, ShimError> {
        let (variable, tensor, before, value) = self.items().nth(i).expect("one of them");
        let now = ffi::fingerprint(tensor)?;
        let now = match value {
            Some(_) => Fingerprint { version: before.version, sample: before.sample, ..now },
            None => now,
        };
        let what = difference(before, &now);
        let updates_buffer = what.is_none() && variable.buffer;
        Ok(Change { variable: variable.name.clone(), what: what.unwrap_or("values"), updates_buffer })
    }

    /// Whether nothing else than blocks has changed variables between the two.
    pub(crate) fn is_of_one_generation(&self, other: &Self) -> bool {
        self.generation == other.generation
    }

    /// How many variables the stores had.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Gives the buffers that differ the values and versions of the snapshot again: for blocks and graphs that read
    /// them before, nothing has happened. The versions are `telling` where none was put back meanwhile.
    pub(crate) fn put_buffers(&self, telling: bool) -> Result<(), ShimError> {
        if !self.variables.buffers {
            return Ok(());
        }
        for (_, tensor, before, value) in self.items() {
            let Some(value) = value else { continue };
            let same = if telling { ffi::keeps_values(tensor, value, before) } else { ffi::same_bits(value, tensor) };
            if !same || ffi::fingerprint(tensor)?.version != before.version {
                ffi::put_values(tensor, value, before.version)?;
            }
        }
        Ok(())
    }

    /// Whether `identity` is one of the variables.
    pub(crate) fn knows(&self, identity: usize) -> bool {
        self.variables.identities.binary_search(&identity).is_ok()
    }

    /// Whether a variable lives in the storage.
    pub(crate) fn holds(&self, storage: usize) -> bool {
        self.storages.binary_search(&storage).is_ok()
    }

    /// The variables' storages, for tapes.
    pub(crate) fn storage_set(&self) -> Result<&ffi::StorageSet, ShimError> {
        if let Some(set) = self.storage_set.get() {
            return Ok(set);
        }
        let set = ffi::StorageSet::new(self.variables.tensors())?;
        Ok(self.storage_set.get_or_init(|| set))
    }

    /// The first variable on a CUDA device, and that device.
    pub(crate) fn cuda_device(&self) -> Option<(&str, tch::Device)> {
        let mut devices = self.items().map(|(variable, tensor, ..)| (variable.name.as_str(), tensor.device()));
        devices.find(|(_, device)| device.is_cuda())
    }
}

/// What of a tensor differs, if anything does.
pub(crate) fn difference(before: &Fingerprint, now: &Fingerprint) -> Option<&'static str> {
    if now.requires_grad != before.requires_grad {
        Some("requires_grad")
    } else if now.layout != before.layout {
        Some("kind, device or shape")
    } else if now.data != before.data {
        Some("storage")
    } else if now.version != before.version || now.sample != before.sample {
        Some("values")
    } else {
        None
    }
}
