//! The parameter store: the seam between a rollout and whoever owns the parameters.

use std::collections::HashMap;
use std::sync::PoisonError;

use tch::{Tensor, nn};

use crate::dist::DistError;
use crate::ffi;

mod sealed {
    use tch::Tensor;

    use super::{Parameter, Shards};

    pub trait Store {
        /// All variables with their names.
        fn named(&self) -> Vec<(String, Tensor)>;
        /// Those that were made to be trained, also while they are frozen.
        fn trainable(&self) -> Vec<Tensor>;
        /// The same with their names and groups; one that has two names comes twice.
        fn parameters(&self) -> Vec<Parameter>;
        /// How many there are; changes when one is added.
        fn count(&self) -> usize;
        /// Of a store whose parameters come and go.
        fn shards(&self) -> Option<&dyn Shards> {
            None
        }
    }
}

/// A variable that was made to be trained.
#[derive(Debug)]
pub struct Parameter {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// Its [group](nn::Path::set_group).
    pub(crate) group: usize,
}

/// Parameters of which this process holds pieces: they are whole while a window on their unit is open.
///
/// What it does together with other processes, all of them must do in the same order; a failure is then the end of all.
pub trait Shards {
    /// The unit of the object that a block belongs to.
    fn unit(&self, key: &UnitKey) -> Option<usize>;
    /// The unit that is open while a rollout lives.
    fn resident(&self) -> usize;
    /// Brings the parameters together, if no other window is open. Collective.
    fn open(&self, unit: usize) -> Result<(), DistError>;
    /// Lets go of them, if it was the last window.
    fn close(&self, unit: usize);
    /// The unit, if any, is the next one that will be opened: its parameters may be on their way until then. Collective.
    fn prefetch(&self, unit: Option<usize>) -> Result<(), DistError>;
    /// A backward pass begins; false where one is under way.
    fn begin_pass(&self) -> bool;
    fn end_pass(&self);
    /// Takes the whole `.grad`s, while a window is open.
    fn take_grads(&self, unit: usize) -> Result<Vec<Option<Tensor>>, DistError>;
    /// Adds them up over all processes, and this process's pieces to what there is. Collective.
    fn reduce(&self, unit: usize, grads: Vec<Option<Tensor>>) -> Result<(), DistError>;
    /// What was added up becomes the pieces' `.grad`; all windows are closed.
    fn flush(&self) -> Result<(), DistError>;
    /// Drops what was added up.
    fn forget(&self);
    /// The parameters' versions, which change when somebody writes to them.
    fn versions(&self) -> Result<Vec<u64>, DistError>;
    /// The first parameter whose version differs.
    fn changed(&self, before: &[u64]) -> Result<Option<String>, DistError>;
    /// Tells the other processes that this one has failed.
    fn abort(&self, why: &str);
    /// Whether it is one of the parameters that are whole now.
    ///
    /// # Errors
    /// If it is one that is a piece now.
    fn is_whole(&self, identity: usize) -> Result<bool, DistError>;
}

/// Which object a block is a method of: a struct and its first field have one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitKey {
    address: usize,
    size: usize,
    ty: &'static str,
}

impl UnitKey {
    pub(crate) fn of<T: ?Sized>(object: &T) -> Self {
        let address = std::ptr::from_ref(object).cast::<()>().addr();
        Self { address, size: size_of_val(object), ty: std::any::type_name::<T>() }
    }
}

pub(crate) use sealed::Store;

/// What holds a model's parameters: [`tch::nn::VarStore`], or a [`Sharded`](crate::Sharded) store. Sealed.
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

    fn parameters(&self) -> Vec<Parameter> {
        let groups = groups(self);
        let parameter = |(name, tensor): (String, Tensor)| {
            let group = *groups.get(&ffi::identity(&tensor))?;
            Some(Parameter { name, tensor, group })
        };
        self.named().into_iter().filter_map(parameter).collect()
    }

    fn count(&self) -> usize {
        self.len()
    }
}

/// The groups of the variables that were made to be trained, by [identity](ffi::identity).
pub(crate) fn groups(vs: &nn::VarStore) -> HashMap<usize, usize> {
    let variables = vs.variables_.lock().unwrap_or_else(PoisonError::into_inner);
    variables.trainable_variables.iter().map(|variable| (ffi::identity(&variable.tensor), variable.group)).collect()
}

/// How many variables the stores have.
pub(crate) fn count(stores: &[&dyn Store]) -> usize {
    stores.iter().map(|store| store.count()).sum()
}
