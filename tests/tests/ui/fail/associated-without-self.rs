//! Without the word `Self` an associated function looks like a free one: the attribute goes on the impl.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn double(x: &Tensor) -> Tensor {
        x * 2.0
    }
}

fn main() {}
