//! Owned receivers.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn boxed(self: Box<Self>, x: &Tensor) -> Tensor {
        x + 1.0
    }

    #[replay_block]
    fn shared(self: std::sync::Arc<Self>, x: &Tensor) -> Tensor {
        x + 1.0
    }
}

fn main() {}
