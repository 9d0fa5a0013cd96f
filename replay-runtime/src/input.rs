//! What a block may take: tensors, which the runtime records, and plain data, which it keeps a copy of.

use std::marker::PhantomData;
use std::slice;

use tch::Tensor;

mod sealed {
    pub trait Sealed {}
}

/// A tensor parameter of a block: `&Tensor`, `Tensor`, `Option<&Tensor>` or `Option<Tensor>`.
///
/// Implemented here for these four, and sealed. Any other parameter is data and is marked `#[meta]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a tensor input of a replay block",
    label = "not `&Tensor`, `Tensor`, `Option<&Tensor>` or `Option<Tensor>`",
    note = "data that is no tensor is marked `#[meta]` in the signature under `#[replay_block]`, and owned",
    note = "tensors inside a container are passed one by one, or stacked into one tensor"
)]
pub trait ReplayInput: sealed::Sealed {
    /// How the parameter is made again for the body.
    type Form: FromLeaf;

    /// The tensor, where there is one.
    fn as_input(&self) -> Option<&Tensor>;
}

/// The way back from a recorded input to a parameter of this form.
///
/// Forms, and not the parameters themselves: a form borrows nothing, so the body of a block can hold it, and a
/// parameter that is no input fails one bound and not two.
pub trait FromLeaf: Copy + 'static {
    /// The parameter, for the time of one call.
    type Parameter<'leaf>;

    /// The parameter made of the leaf; an owned one shares its storage.
    ///
    /// # Panics
    ///
    /// Where a tensor is needed and the leaf is `None`.
    fn from_leaf(leaf: &Option<Tensor>) -> Self::Parameter<'_>;
}

/// Data that a block takes beside its tensors: anything that is `Clone + Send + 'static`.
///
/// The forward and each replay get a clone of it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be `#[meta]` data of a replay block",
    label = "not `Clone + Send + 'static`",
    note = "`#[replay_block]` keeps a copy of `#[meta]` data from the forward to the replay: pass owned data"
)]
pub trait ReplayMeta: Clone + Send + 'static {}

impl<T: Clone + Send + 'static> ReplayMeta for T {}

const NO_LEAF: &str = "the runtime keeps a leaf for each input that had a tensor";

impl sealed::Sealed for Tensor {}
impl sealed::Sealed for &Tensor {}
impl sealed::Sealed for Option<Tensor> {}
impl sealed::Sealed for Option<&Tensor> {}

/// `Tensor`.
#[derive(Debug, Clone, Copy)]
pub struct Owned;
/// `&Tensor`.
#[derive(Debug, Clone, Copy)]
pub struct Borrowed;
/// `Option<Tensor>`.
#[derive(Debug, Clone, Copy)]
pub struct OptionalOwned;
/// `Option<&Tensor>`.
#[derive(Debug, Clone, Copy)]
pub struct OptionalBorrowed;

impl ReplayInput for Tensor {
    type Form = Owned;

    fn as_input(&self) -> Option<&Tensor> {
        Some(self)
    }
}

impl ReplayInput for &Tensor {
    type Form = Borrowed;

    fn as_input(&self) -> Option<&Tensor> {
        Some(self)
    }
}

impl ReplayInput for Option<Tensor> {
    type Form = OptionalOwned;

    fn as_input(&self) -> Option<&Tensor> {
        self.as_ref()
    }
}

impl ReplayInput for Option<&Tensor> {
    type Form = OptionalBorrowed;

    fn as_input(&self) -> Option<&Tensor> {
        *self
    }
}

impl FromLeaf for Owned {
    type Parameter<'leaf> = Tensor;

    fn from_leaf(leaf: &Option<Tensor>) -> Tensor {
        leaf.as_ref().expect(NO_LEAF).shallow_clone()
    }
}

impl FromLeaf for Borrowed {
    type Parameter<'leaf> = &'leaf Tensor;

    fn from_leaf(leaf: &Option<Tensor>) -> &Tensor {
        leaf.as_ref().expect(NO_LEAF)
    }
}

impl FromLeaf for OptionalOwned {
    type Parameter<'leaf> = Option<Tensor>;

    fn from_leaf(leaf: &Option<Tensor>) -> Option<Tensor> {
        leaf.as_ref().map(Tensor::shallow_clone)
    }
}

impl FromLeaf for OptionalBorrowed {
    type Parameter<'leaf> = Option<&'leaf Tensor>;

    fn from_leaf(leaf: &Option<Tensor>) -> Option<&Tensor> {
        leaf.as_ref()
    }
}

/// The tensor of a parameter, and its form for [`next_input`].
pub fn input<T: ReplayInput>(parameter: &T) -> (Option<&Tensor>, PhantomData<T::Form>) {
    (parameter.as_input(), PhantomData)
}

/// The next parameter of the body, made of the next leaf.
///
/// # Panics
///
/// Where the leaves run out: generated code asks for as many as it gave.
pub fn next_input<'leaf, F: FromLeaf>(
    _: PhantomData<F>,
    leaves: &mut slice::Iter<'leaf, Option<Tensor>>,
) -> F::Parameter<'leaf> {
    F::from_leaf(leaves.next().expect("the runtime keeps one leaf for each input"))
}

/// Lets the compiler check `#[meta]` data at the parameter's own type.
pub fn assert_meta<T: ReplayMeta>(_: &T) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_gives_its_tensor_and_comes_back() {
        let tensor = Tensor::from(2.0);
        let (absent, twin) = (None::<Tensor>, Some(&tensor));
        let reference = &tensor;
        let (first, borrowed) = input(&reference);
        let (second, owned) = input(&tensor);
        let (third, optional_borrowed) = input(&twin);
        let (fourth, optional_owned) = input(&absent);
        let leaves = [first, second, third, fourth].map(|input| input.map(Tensor::shallow_clone));
        assert!(leaves[2].is_some() && leaves[3].is_none());

        let mut leaves = leaves.iter();
        let borrowed: &Tensor = next_input(borrowed, &mut leaves);
        let owned: Tensor = next_input(owned, &mut leaves);
        assert_eq!(borrowed.data_ptr(), owned.data_ptr());
        assert!(next_input(optional_borrowed, &mut leaves).is_some());
        assert!(next_input(optional_owned, &mut leaves).is_none());
    }

    #[test]
    #[should_panic(expected = "a leaf for each input")]
    fn a_missing_leaf_is_a_bug_of_the_runtime() {
        let _: &Tensor = next_input(PhantomData::<Borrowed>, &mut [None].iter());
    }
}
