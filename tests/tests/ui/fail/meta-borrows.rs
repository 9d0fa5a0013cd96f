//! Data is owned, in every part.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step<'a>(&self, x: &Tensor, #[meta] name: std::borrow::Cow<'a, str>) -> Tensor {
        x + 1.0
    }
}

fn main() {}
