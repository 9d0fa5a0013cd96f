//! What a block may return, and how it becomes the list of tensors that the runtime records.

use std::error::Error;

use tch::Tensor;

/// The error of a block's own body, as the source of a [`ReplayError`](crate::ReplayError).
pub type BoxError = Box<dyn Error + Send + Sync>;

mod sealed {
    pub trait Sealed {}
}

/// The return type of a block: `Tensor`, a flat tuple of up to twelve tensors, or a `Result` of either.
///
/// The error of the `Result` may be anything that turns into `Box<dyn Error + Send + Sync>`: an error type,
/// a string, `anyhow::Error`. Implemented here for all accepted types, and sealed.
#[diagnostic::on_unimplemented(
    message = "a replay block cannot return `{Self}`",
    label = "not a `Tensor`, a flat tuple of `Tensor`, or a `Result` of either",
    note = "`#[replay_block]` records tensors: return each tensor as one element of the tuple, and keep other values out of the block",
    note = "the error of a `Result` must convert into `Box<dyn Error + Send + Sync>`"
)]
pub trait ReplayOutput: sealed::Sealed {
    /// What the caller of the block gets: the type itself, or that of the `Ok`.
    type Value;

    /// The tensors, first to last.
    ///
    /// # Errors
    ///
    /// The block's own error, where it returned one.
    fn into_tensors(self) -> Result<Vec<Tensor>, BoxError>;

    /// The value made of as many tensors as [`into_tensors`](Self::into_tensors) gave.
    ///
    /// # Panics
    ///
    /// With any other number of tensors.
    fn from_tensors(tensors: Vec<Tensor>) -> Self::Value;
}

/// An output that is not a `Result`: keeps `Result<Result<..>>` out.
#[diagnostic::on_unimplemented(
    message = "a replay block cannot return `{Self}` inside a `Result`",
    label = "not a `Tensor` or a flat tuple of `Tensor`",
    note = "`#[replay_block]` records tensors: return each tensor as one element of the tuple, and keep other values out of the block"
)]
pub trait Tensors: sealed::Sealed + Sized {
    /// The tensors, first to last.
    fn into_list(self) -> Vec<Tensor>;

    /// The reverse; `None` when the number of tensors differs.
    fn from_list(tensors: Vec<Tensor>) -> Option<Self>;
}

const WRONG_COUNT: &str = "the runtime hands back as many tensors as the block returned";

impl sealed::Sealed for Tensor {}

impl Tensors for Tensor {
    fn into_list(self) -> Vec<Tensor> {
        vec![self]
    }

    fn from_list(tensors: Vec<Tensor>) -> Option<Self> {
        let [tensor] = <[Tensor; 1]>::try_from(tensors).ok()?;
        Some(tensor)
    }
}

impl ReplayOutput for Tensor {
    type Value = Self;

    fn into_tensors(self) -> Result<Vec<Tensor>, BoxError> {
        Ok(self.into_list())
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Self::Value {
        Self::from_list(tensors).expect(WRONG_COUNT)
    }
}

impl<T, E> sealed::Sealed for Result<T, E> {}

impl<T: Tensors, E: Into<BoxError>> ReplayOutput for Result<T, E> {
    type Value = T;

    fn into_tensors(self) -> Result<Vec<Tensor>, BoxError> {
        self.map(Tensors::into_list).map_err(Into::into)
    }

    fn from_tensors(tensors: Vec<Tensor>) -> Self::Value {
        T::from_list(tensors).expect(WRONG_COUNT)
    }
}

/// `Input: tuple!(2: a T, b T);`  `Output:` the three impls of `(Tensor, Tensor)`.
macro_rules! tuple {
    ($count:literal: $($element:ident $type:ident),+) => {
        impl sealed::Sealed for ($($type,)+) {}

        impl Tensors for ($($type,)+) {
            fn into_list(self) -> Vec<Tensor> {
                let ($($element,)+) = self;
                vec![$($element),+]
            }

            fn from_list(tensors: Vec<Tensor>) -> Option<Self> {
                let [$($element),+] = <[Tensor; $count]>::try_from(tensors).ok()?;
                Some(($($element,)+))
            }
        }

        impl ReplayOutput for ($($type,)+) {
            type Value = Self;

            fn into_tensors(self) -> Result<Vec<Tensor>, BoxError> {
                Ok(self.into_list())
            }

            fn from_tensors(tensors: Vec<Tensor>) -> Self::Value {
                Self::from_list(tensors).expect(WRONG_COUNT)
            }
        }
    };
}

tuple!(1: t0 Tensor);
tuple!(2: t0 Tensor, t1 Tensor);
tuple!(3: t0 Tensor, t1 Tensor, t2 Tensor);
tuple!(4: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor);
tuple!(5: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor);
tuple!(6: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor);
tuple!(7: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor, t6 Tensor);
tuple!(8: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor, t6 Tensor, t7 Tensor);
tuple!(9: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor, t6 Tensor, t7 Tensor, t8 Tensor);
tuple!(10: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor, t6 Tensor, t7 Tensor, t8 Tensor, t9 Tensor);
tuple!(11: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor, t6 Tensor, t7 Tensor, t8 Tensor, t9 Tensor, t10 Tensor);
tuple!(12: t0 Tensor, t1 Tensor, t2 Tensor, t3 Tensor, t4 Tensor, t5 Tensor, t6 Tensor, t7 Tensor, t8 Tensor, t9 Tensor, t10 Tensor, t11 Tensor);

#[cfg(test)]
mod tests {
    use super::*;

    fn scalar(value: f64) -> Tensor {
        Tensor::from(value)
    }

    #[test]
    fn a_tuple_comes_back_in_its_order() {
        let tensors = (scalar(1.0), scalar(2.0), scalar(3.0)).into_tensors().unwrap();
        assert_eq!(tensors.len(), 3);
        let (first, _, third) = <(Tensor, Tensor, Tensor)>::from_tensors(tensors);
        assert_eq!((first.double_value(&[]), third.double_value(&[])), (1.0, 3.0));
    }

    #[test]
    fn an_error_keeps_its_text() {
        let output: Result<Tensor, &str> = Err("too cold");
        assert_eq!(output.into_tensors().unwrap_err().to_string(), "too cold");
    }

    #[test]
    fn a_result_gives_the_value_of_its_ok() {
        let output: Result<(Tensor, Tensor), BoxError> = Ok((scalar(1.0), scalar(2.0)));
        let tensors = output.into_tensors().unwrap();
        let (_, second) = <Result<(Tensor, Tensor), BoxError>>::from_tensors(tensors);
        assert!((second.double_value(&[]) - 2.0).abs() < f64::EPSILON);
    }

    #[test]
    #[should_panic(expected = "as many tensors as the block returned")]
    fn another_number_of_tensors_is_a_bug_of_the_runtime() {
        let _ = <(Tensor, Tensor)>::from_tensors(vec![scalar(1.0)]);
    }
}
