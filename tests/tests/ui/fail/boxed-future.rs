//! What another attribute makes of the method is what counts.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

use std::future::Future;
use std::pin::Pin;

struct World;

impl World {
    #[replay_block]
    fn step<'a>(&'a self, x: &'a Tensor) -> Pin<Box<dyn Future<Output = Tensor> + 'a>> {
        Box::pin(async move { x + 1.0 })
    }
}

fn main() {}
