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

#[test]
fn runs() {
    let world = World;
    let output = with_rollout!(|rollout| world.step_replay(&rollout, &scalar(1.0), &scalar(2.0), 3.0).unwrap());
    assert!((value(&output) - 12.0).abs() < f64::EPSILON);
}
