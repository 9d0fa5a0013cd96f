//! Tensors in containers are not seen.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(
        &self,
        a: Vec<Tensor>,
        b: &[Tensor],
        c: [Tensor; 2],
        d: std::collections::HashMap<String, Tensor>,
        e: (Tensor, Tensor),
    ) -> Tensor {
        a[0].shallow_clone()
    }
}

fn main() {}
