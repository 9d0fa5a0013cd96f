//! The attribute inside the output of a user's macro: names and types come with other spans and in invisible groups.

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

macro_rules! world {
    ($name:ident, $method:ident, $input:ident: $ty:ty => $output:ty, $body:expr) => {
        struct $name;

        impl $name {
            #[replay_block]
            fn $method(&self, $input: $ty, other: &Tensor, #[meta] by: f64) -> $output {
                ($body + other) * by
            }
        }
    };
}

world!(World, step, x: &Tensor => Tensor, x + 1.0);

/// The attribute itself, `self`, visibilities, lifetimes, bounds and types from the caller; a local of the macro with
/// the name of a parameter of the caller.
macro_rules! method {
    (
        $(#[$attr:meta])*
        $vis:vis fn $method:ident<$lifetime:lifetime, $generic:ident: $bound:path>(
            &$this:ident, $state:ident: &$tensor:path, $(#[$meta:meta])* $data:ident: $of:ty
        ) -> Result<$ok:ty, $error:ty> $body:block
    ) => {
        $(#[$attr])*
        $vis fn $method<$lifetime, $generic: $bound + Clone + Send + 'static>(
            &$lifetime $this, $state: &$tensor, $(#[$meta])* $data: $of
        ) -> Result<$ok, $error> {
            let hidden = $body;
            hidden
        }
    };
}

macro_rules! item {
    ($item:item) => {
        #[replay_block]
        $item
    };
}

macro_rules! tokens {
    ($($token:tt)*) => {
        $($token)*
    };
}

#[derive(Debug)]
struct Given(f64);

impl Given {
    method! {
        /// Documented.
        #[replay_block(name = "again")]
        #[inline]
        pub(crate) fn step<'given, N: Into<f64>>(&self, hidden: &Tensor, #[meta] by: N) -> Result<Tensor, String> {
            Ok(hidden * by.into() + self.0)
        }
    }

    tokens! {
        #[replay_block]
        fn raw(&self, r#in: Option<&Tensor>, #[meta] by: f64) -> Tensor {
            r#in.map_or_else(|| Tensor::from(0.0), |x| x * by)
        }
    }
}

item! {
    impl tch::nn::Module for Given {
        fn forward(&self, xs: &Tensor) -> Tensor {
            xs - self.0
        }
    }
}

item! {
    fn free(x: &Tensor) -> (Tensor, Tensor) {
        (x + 1.0, x + 2.0)
    }
}

#[test]
fn runs() {
    let (world, given) = (World, Given(0.5));
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [
            world.step_replay(&rollout, &x, &scalar(2.0), 3.0).unwrap(),
            given.again(&rollout, &x, 4.0_f32).unwrap(),
            given.raw_replay(&rollout, Some(&x), 2.0).unwrap(),
            given.forward_replay(&rollout, &x).unwrap(),
            free_replay(&rollout, &x).unwrap().1,
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [12.0, 4.5, 2.0, 0.5, 3.0]);
}
