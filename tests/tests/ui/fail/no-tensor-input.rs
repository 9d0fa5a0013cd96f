//! Nothing to keep.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn noise(&self, #[meta] size: i64) -> Tensor {
        Tensor::from(size as f64)
    }
}

fn main() {}
