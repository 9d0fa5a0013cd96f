//! Blocks inside functions and constants, names that need `r#`, and generics called as those of the runtime.

use std::marker::PhantomData;

use replay_runtime::{Rollout, replay_block};
use tch::Tensor;

use crate::{scalar, value};

#[test]
fn types_and_functions_of_a_function() {
    struct Local(f64);

    impl Local {
        #[replay_block]
        fn step(&self, x: &Tensor) -> Tensor {
            #[replay_block]
            fn double(x: &Tensor) -> Tensor {
                x * 2.0
            }
            with_rollout!(|rollout| double_replay(&rollout, x).unwrap()) + self.0
        }
    }

    #[replay_block]
    impl tch::nn::Module for Local {
        fn forward(&self, xs: &Tensor) -> Tensor {
            xs - self.0
        }
    }

    impl std::fmt::Debug for Local {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Local")
        }
    }

    let local = Local(0.5);
    let outputs = with_rollout!(|rollout| [
        local.step_replay(&rollout, &scalar(1.0)).unwrap(),
        local.forward_replay(&rollout, &scalar(1.0)).unwrap(),
    ]);
    assert_eq!(outputs.map(|output| value(&output)), [2.5, 0.5]);
}

struct World;

const _: () = {
    impl World {
        #[replay_block]
        fn in_a_constant(&self, x: &Tensor) -> Tensor {
            x + 1.0
        }
    }
};

#[allow(non_camel_case_types)]
mod r#mod {
    use replay_runtime::replay_block;
    use tch::Tensor;

    pub(super) trait r#trait {
        type r#type;
        fn r#fn(&self, r#in: &Tensor, r#ref: Self::r#type) -> Tensor;
    }

    pub(super) struct r#struct;

    #[replay_block]
    impl r#trait for r#struct {
        type r#type = f64;

        fn r#fn(&self, r#in: &Tensor, #[meta] r#ref: Self::r#type) -> Tensor {
            r#in + r#ref
        }
    }
}

/// The runtime's own parameters are called `R`, `C`, `F` and `'m`.
struct Named<'m, R, C>(&'m R, PhantomData<C>);

impl<'m, R: Copy + Into<f64>, C> Named<'m, R, C> {
    #[replay_block]
    fn step<'rollout, F, T, const N: usize>(
        &'m self,
        rollout: &Rollout<'m>,
        x: &Tensor,
        #[meta] body: F,
        #[meta] context: impl Into<f64> + Clone + Send + 'static,
        #[meta] _marker: PhantomData<T>,
    ) -> Result<Tensor, replay_runtime::ReplayError>
    where
        for<'a> F: Fn(&'a Tensor, f64) -> Tensor + Clone + Send + 'static,
        T: 'rollout + Clone + Send + 'static,
    {
        self.inner_replay::<N>(rollout, &body(x, context.into()))
    }

    #[replay_block]
    fn inner<const N: usize>(&self, x: &Tensor) -> Tensor {
        x + (*self.0).into() + f64::from(u8::try_from(N).unwrap())
    }
}

#[test]
fn names_do_not_matter() {
    let by = 0.25_f32;
    let named = Named::<_, Rollout<'static>>(&by, PhantomData);
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [
            World.in_a_constant_replay(&rollout, &x).unwrap(),
            r#mod::r#struct.fn_replay(&rollout, &x, 2.0).unwrap(),
            named.step_replay::<_, u8, 3>(&rollout, &x, |x, by| x * by, 4.0_f32, PhantomData).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [2.0, 3.0, 7.25]);
    assert!(replay_runtime::blocks().iter().any(|block| block.name() == "struct::fn" && block.inputs() == ["in"]));
}
