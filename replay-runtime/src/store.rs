//! The parameter store: the seam between a rollout and whoever owns the parameters.

use tch::{Tensor, nn};

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

/// How many variables the stores have.
pub(crate) fn count(stores: &[&dyn Store]) -> usize {
    stores.iter().map(|store| store.count()).sum()
}
