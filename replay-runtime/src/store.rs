//! The parameter store: the seam between a rollout and whoever owns the parameters, and the watch over them
//! between a block's forward and its replay.

use std::collections::HashSet;
use std::rc::Rc;

use tch::{Tensor, nn};

use crate::ffi::{self, Fingerprint, ShimError};

mod sealed {
    use tch::Tensor;

    pub trait Store {
        /// All variables with their names.
        fn named(&self) -> Vec<(String, Tensor)>;
        /// Those that were made to be trained, also while they are frozen.
        fn trainable(&self) -> Vec<Tensor>;
        /// How many there are; changes when one is added.
        fn count(&self) -> usize;
    }
}

pub(crate) use sealed::Store;

/// What holds a model's parameters: [`tch::nn::VarStore`]. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not hold a model's parameters",
    label = "expected `tch::nn::VarStore`",
    note = "a rollout borrows the store whose gradients it computes: `Rollout::new(&vs)`"
)]
pub trait ParameterStore: Store {}

impl ParameterStore for nn::VarStore {}

impl Store for nn::VarStore {
    fn named(&self) -> Vec<(String, Tensor)> {
        self.variables().into_iter().collect()
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable_variables()
    }

    fn count(&self) -> usize {
        self.len()
    }
}

/// One variable of a store.
struct Variable {
    name: String,
    tensor: Tensor,
    /// Not trainable: its values are compared too, since normalisation kernels write them without a new version.
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
                let buffer = !trainable.contains(&ffi::identity(&tensor)) && !tensor.is_sparse();
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
    fingerprints: Vec<Fingerprint>,
    /// Copies of the buffers' values, in the order of the variables.
    buffers: Vec<Tensor>,
    storages: HashSet<usize>,
}

/// A variable that is not what it was.
pub(crate) struct Change {
    pub(crate) variable: String,
    pub(crate) what: &'static str,
}

impl Snapshot {
    /// Takes one, sharing with `last` what has not changed.
    pub(crate) fn take(stores: &[&dyn Store], last: Option<Rc<Self>>) -> Result<Rc<Self>, ShimError> {
        let count = count(stores);
        let variables = match last {
            Some(last) if last.count == count => {
                if last.change()?.is_none() {
                    return Ok(last);
                }
                Rc::clone(&last.variables)
            }
            _ => Rc::new(Variables::collect(stores)),
        };
        let fingerprints = variables.items.iter().map(|v| ffi::fingerprint(&v.tensor)).collect::<Result<_, _>>()?;
        let buffers = variables.items.iter().filter(|v| v.buffer).map(|v| copy(&v.tensor)).collect();
        let storages = variables.items.iter().filter_map(|v| ffi::storage(&v.tensor)).collect();
        Ok(Rc::new(Self { variables, count, fingerprints, buffers, storages }))
    }

    /// The first variable that differs from the snapshot.
    pub(crate) fn change(&self) -> Result<Option<Change>, ShimError> {
        let mut buffers = self.buffers.iter();
        for (variable, before) in self.variables.items.iter().zip(&self.fingerprints) {
            let now = ffi::fingerprint(&variable.tensor)?;
            let value = variable.buffer.then(|| buffers.next()).flatten();
            let what = difference(before, &now)
                .or_else(|| value.filter(|value| !same_values(value, &variable.tensor)).map(|_| "values"));
            if let Some(what) = what {
                return Ok(Some(Change { variable: variable.name.clone(), what }));
            }
        }
        Ok(None)
    }

    /// How many variables the stores had.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Writes the buffers' values back where they differ, past their version counters: for earlier blocks of the
    /// rollout nothing has changed.
    fn restore_buffers(&self) {
        let _guard = tch::no_grad_guard();
        let buffers = self.variables.items.iter().filter(|v| v.buffer);
        for (variable, value) in buffers.zip(&self.buffers) {
            let tensor = &variable.tensor;
            if tensor.size() == value.size() && !same_values(value, tensor) {
                tensor.data().copy_(value);
            }
        }
    }

    /// Whether `identity` is one of the variables.
    pub(crate) fn knows(&self, identity: usize) -> bool {
        self.variables.identities.contains(&identity)
    }

    /// Whether a variable lives in the storage.
    pub(crate) fn holds(&self, storage: usize) -> bool {
        self.storages.contains(&storage)
    }

    /// The first variable on a CUDA device, and that device.
    pub(crate) fn cuda_device(&self) -> Option<(&str, tch::Device)> {
        let devices = self.variables.items.iter().map(|v| (v.name.as_str(), v.tensor.device()));
        devices.into_iter().find(|(_, device)| device.is_cuda())
    }
}

/// Puts the buffers of a snapshot back when it is dropped, on errors and on unwind, unless all went well.
pub(crate) struct BuffersGuard<'s>(Option<&'s Snapshot>);

impl<'s> BuffersGuard<'s> {
    pub(crate) fn new(snapshot: &'s Snapshot) -> Self {
        Self(Some(snapshot))
    }

    /// All went well.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for BuffersGuard<'_> {
    fn drop(&mut self) {
        if let Some(snapshot) = self.0 {
            snapshot.restore_buffers();
        }
    }
}

/// How many variables the stores have.
pub(crate) fn count(stores: &[&dyn Store]) -> usize {
    stores.iter().map(|store| store.count()).sum()
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

fn copy(tensor: &Tensor) -> Tensor {
    let _guard = tch::no_grad_guard();
    tensor.detach().copy()
}

/// Equal element by element, NaN equal to NaN.
fn same_values(a: &Tensor, b: &Tensor) -> bool {
    let _guard = tch::no_grad_guard();
    if a.size() != b.size() {
        return false;
    }
    a.equal(b) || {
        let both_nan = a.isnan().logical_and(&b.isnan());
        a.eq_tensor(b).logical_or(&both_nan).all().int64_value(&[]) != 0
    }
}
