//! A name that the attribute cannot judge: the trait does.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct Action(f64);

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, action: Action, config: &Action) -> Tensor {
        x + action.0
    }
}

fn main() {}
