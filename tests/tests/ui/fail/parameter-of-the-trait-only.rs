//! An inherent method cannot have it.
#![allow(unused)]

use replay_runtime::replay_block;
use tch::Tensor;

trait Dynamics<N> {
    fn step(&self, x: &Tensor, noise: N) -> Tensor;
}

struct World;

#[replay_block]
impl<N: Into<f64> + Clone + Send + 'static> Dynamics<N> for World {
    fn step(&self, x: &Tensor, #[meta] noise: N) -> Tensor {
        x + noise.into()
    }
}

struct Other;

#[replay_block]
impl<N> Dynamics<N> for Other
where
    N: Into<f64> + Clone + Send + 'static,
{
    fn step(&self, x: &Tensor, #[meta] noise: N) -> Tensor {
        x + noise.into()
    }
}

fn main() {}
