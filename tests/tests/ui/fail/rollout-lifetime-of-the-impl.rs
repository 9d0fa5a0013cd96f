//! The sibling's own lifetime, seen by the user for once: an attribute on a method cannot see that of the impl.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct View<'rollout>(&'rollout f64);

impl<'rollout> View<'rollout> {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + *self.0
    }
}

fn main() {}
