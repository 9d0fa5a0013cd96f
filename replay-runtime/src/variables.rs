//! The watch over the stores' variables between a block's forward and its replay.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::rc::Rc;

use tch::Tensor;

use crate::ffi::{self, Fingerprint, ShimError};
use crate::store::{self, Store};

/// One variable of a store.
struct Variable {
    name: String,
    tensor: Tensor,
    /// Not trainable, as the statistics of normalisation layers. Its values are compared instead of its version:
    /// normalisation kernels write them without a new one.
    buffer: bool,
}

/// The variables of all stores, tied ones once.
struct Variables {
    items: Vec<Variable>,
    identities: HashSet<usize>,
}

impl Variables {
    fn collect(stores: &[&dyn Store]) -> Self {
        let mut named: Vec<_> = stores.iter().flat_map(|store| store.named()).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let trainable: HashSet<usize> =
            stores.iter().flat_map(|store| store.trainable()).map(|tensor| ffi::identity(&tensor)).collect();
        let mut identities = HashSet::new();
        let items = named
            .into_iter()
            .filter(|(_, tensor)| tensor.defined() && identities.insert(ffi::identity(tensor)))
            .map(|(name, tensor)| {
                // Values of a sparse one cannot be put back in place.
                let strided = tensor.numel() == 0 || ffi::storage(&tensor).is_some();
                let buffer = !trainable.contains(&ffi::identity(&tensor)) && strided;
                Variable { name, tensor, buffer }
            })
            .collect();
        Self { items, identities }
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
    values: Vec<Option<Tensor>>,
    storages: HashSet<usize>,
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
            Some(last) if last.count == count => match last.change()? {
                None => last.refreshed(),
                Some(_) => last.renew(last.generation + 1),
            },
            _ => {
                let variables = Rc::new(Variables::collect(stores));
                let nothing = variables.items.iter().map(|_| None).collect();
                Self::of(variables, count, last.map_or(0, |last| last.generation + 1), nothing)
            }
        }
    }

    /// The variables after a block that may update buffers, which this snapshot was taken before.
    pub(crate) fn after_block(self: &Rc<Self>) -> Result<Rc<Self>, ShimError> {
        if self.change()?.is_none() { self.refreshed() } else { self.renew(self.generation) }
    }

    /// The same values, and the versions as they are now: a buffer may have been given the same values again.
    pub(crate) fn refreshed(self: &Rc<Self>) -> Result<Rc<Self>, ShimError> {
        for (variable, before, value) in self.items() {
            if value.is_some() && ffi::fingerprint(&variable.tensor)?.version != before.version {
                return self.renew(self.generation);
            }
        }
        Ok(Rc::clone(self))
    }

    fn renew(&self, generation: u64) -> Result<Rc<Self>, ShimError> {
        let old = self.values.iter().map(|value| value.as_ref().map(Tensor::shallow_clone)).collect();
        Self::of(Rc::clone(&self.variables), self.count, generation, old)
    }

    /// Reads the variables; of the `old` values, those that are still right are kept.
    fn of(
        variables: Rc<Variables>,
        count: usize,
        generation: u64,
        old: Vec<Option<Tensor>>,
    ) -> Result<Rc<Self>, ShimError> {
        let fingerprints = variables.items.iter().map(|v| ffi::fingerprint(&v.tensor)).collect::<Result<_, _>>()?;
        let values = variables.items.iter().zip(old).map(|(variable, old)| {
            let old = old.filter(|old| ffi::same_bits(old, &variable.tensor));
            variable.buffer.then(|| old.map_or_else(|| ffi::copy(&variable.tensor), Ok)).transpose()
        });
        let values = values.collect::<Result<_, _>>()?;
        let storages = variables.items.iter().filter_map(|v| ffi::storage(&v.tensor)).collect();
        let storage_set = OnceCell::new();
        Ok(Rc::new(Self { variables, count, generation, fingerprints, values, storages, storage_set }))
    }

    fn items(&self) -> impl Iterator<Item = (&Variable, &Fingerprint, Option<&Tensor>)> {
        let values = self.values.iter().map(Option::as_ref);
        self.variables.items.iter().zip(&self.fingerprints).zip(values).map(|((v, print), value)| (v, print, value))
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
        for (variable, before, value) in self.items() {
            let now = ffi::fingerprint(&variable.tensor)?;
            let changed = |what, updates_buffer| Change { variable: variable.name.clone(), what, updates_buffer };
            let change = match value {
                None => difference(before, &now).map(|what| changed(what, false)),
                Some(value) => {
                    let now = Fingerprint { version: before.version, sample: before.sample, ..now };
                    let update = || (!ffi::same_bits(value, &variable.tensor)).then(|| changed("values", true));
                    difference(before, &now).map(|what| changed(what, false)).or_else(update)
                }
            };
            if let Some(change) = change.filter(&wanted) {
                return Ok(Some(change));
            }
        }
        Ok(None)
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
    /// them before, nothing has happened.
    pub(crate) fn put_buffers(&self) -> Result<(), ShimError> {
        for (variable, before, value) in self.items() {
            let Some(value) = value else { continue };
            if !ffi::same_bits(value, &variable.tensor) {
                ffi::put_values(&variable.tensor, value, before.version)?;
            }
        }
        Ok(())
    }

    /// Whether `identity` is one of the variables.
    pub(crate) fn knows(&self, identity: usize) -> bool {
        self.variables.identities.contains(&identity)
    }

    /// Whether a variable lives in the storage.
    pub(crate) fn holds(&self, storage: usize) -> bool {
        self.storages.contains(&storage)
    }

    /// The variables' storages, for tapes.
    pub(crate) fn storage_set(&self) -> Result<&ffi::StorageSet, ShimError> {
        if let Some(set) = self.storage_set.get() {
            return Ok(set);
        }
        let set = ffi::StorageSet::new(self.variables.items.iter().map(|variable| &variable.tensor))?;
        Ok(self.storage_set.get_or_init(|| set))
    }

    /// The first variable on a CUDA device, and that device.
    pub(crate) fn cuda_device(&self) -> Option<(&str, tch::Device)> {
        let devices = self.variables.items.iter().map(|v| (v.name.as_str(), v.tensor.device()));
        devices.into_iter().find(|(_, device)| device.is_cuda())
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
