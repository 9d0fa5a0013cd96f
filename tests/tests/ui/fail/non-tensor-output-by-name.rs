//! A name that the attribute cannot judge: the trait does.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct Output(Tensor);

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Output {
        Output(x + 1.0)
    }
}

fn main() {}
