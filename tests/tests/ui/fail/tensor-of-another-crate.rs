//! A type of the user that is called `Tensor` is none.
#![allow(unused)]

use replay_runtime::replay_block;

struct Tensor;

struct World;

impl World {
    #[replay_block]
    fn input(&self, x: &Tensor) -> tch::Tensor {
        tch::Tensor::from(1.0)
    }

    #[replay_block]
    fn optional(&self, x: &tch::Tensor, mask: Option<Tensor>) -> tch::Tensor {
        x + 1.0
    }

    #[replay_block]
    fn output(&self, x: &tch::Tensor) -> Tensor {
        Tensor
    }

    #[replay_block]
    fn in_a_tuple(&self, x: &tch::Tensor) -> (tch::Tensor, Tensor) {
        (x + 1.0, Tensor)
    }
}

fn main() {}
