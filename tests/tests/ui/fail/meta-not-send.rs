//! Data may be used on a thread of the engine.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

struct World;

impl World {
    #[replay_block]
    fn step(&self, x: &Tensor, #[meta] noise: std::rc::Rc<f64>) -> Tensor {
        x + *noise
    }
}

fn main() {}
