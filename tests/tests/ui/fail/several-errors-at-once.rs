//! All errors of a block in one compile.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block(nam = "again", crate = replay)]
    async unsafe fn step(&mut self, _: &Tensor, frame: i64, #[meta] y: Tensor) -> Vec<Tensor> {
        vec![]
    }
}

fn main() {}
