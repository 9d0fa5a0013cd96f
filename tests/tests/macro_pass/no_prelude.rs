//! Generated code brings its own names.
#![no_implicit_prelude]

struct World;

impl World {
    #[::replay_runtime::replay_block]
    fn step(
        &self,
        x: &::tch::Tensor,
        y: ::core::option::Option<&::tch::Tensor>,
        #[meta] by: f64,
    ) -> ::core::result::Result<::tch::Tensor, ::tch::TchError> {
        let _ = (y, by);
        ::core::result::Result::Ok(x.shallow_clone())
    }
}

#[::replay_runtime::replay_block]
impl ::tch::nn::Module for World {
    fn forward(&self, xs: &::tch::Tensor) -> ::tch::Tensor {
        xs.shallow_clone()
    }
}

impl ::core::fmt::Debug for World {
    fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
        f.write_str("World")
    }
}

#[::core::prelude::v1::test]
fn runs() {
    let world = World;
    let output = with_rollout!(|rollout| {
        let x = world.step_replay(&rollout, &crate::scalar(3.0), ::core::option::Option::None, 2.0).unwrap();
        world.forward_replay(&rollout, &x).unwrap()
    });
    ::core::assert!((crate::value(&output) - 3.0).abs() < f64::EPSILON);
}
