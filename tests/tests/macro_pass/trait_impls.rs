//! The attribute on trait impls: siblings in an inherent impl beside it.

use replay_runtime::replay_block;
use tch::Tensor;
use tch::nn::{Module, ModuleT};

use crate::{scalar, value};

#[derive(Debug)]
struct Net<L> {
    layer: L,
}

#[derive(Debug)]
struct Add(f64);

impl Module for Add {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + self.0
    }
}

#[replay_block]
impl<L> Module for Net<L>
where
    L: Module,
{
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.layer.forward(xs)
    }
}

#[replay_block]
impl Net<Add> {
    #[replay_block]
    fn other(&self, xs: &Tensor) -> Tensor {
        xs * self.layer.0
    }
}

#[derive(Debug)]
struct Trained;

#[replay_block]
impl ModuleT for Trained {
    #[replay_block(name = "again")]
    fn forward_t(&self, xs: &Tensor, #[meta] train: bool) -> Tensor {
        if train { xs + 10.0 } else { xs + 20.0 }
    }
}

trait Dynamics<Noise> {
    type Action;
    type Scale;
    const SHIFT: f64;
    fn step(&self, state: &Tensor, noise: Noise, scale: Self::Scale) -> Tensor;
    fn reset(&self, state: &Tensor) -> Tensor;
    fn pure(state: &Tensor) -> Tensor;
}

struct World<'a>(&'a f64);

#[replay_block]
impl<'a> Dynamics<f64> for World<'a> {
    type Action = ();
    type Scale = f64;
    const SHIFT: f64 = 1.0;

    #[replay_block]
    fn step(&self, state: &Tensor, #[meta] noise: f64, #[meta] scale: Self::Scale) -> Tensor {
        state * scale + noise + *self.0 + <Self as Dynamics<f64>>::SHIFT
    }

    fn reset(&self, state: &Tensor) -> Tensor {
        state.shallow_clone()
    }

    #[replay_block]
    fn pure(state: &Tensor) -> Tensor {
        state + 100.0
    }
}

/// A parameter that the type lacks, and that a bound knows.
trait Driven<N> {
    fn drive(&self, x: &Tensor) -> Tensor;
}

struct Drives<I>(I);

#[replay_block]
impl<N: Into<f64>, I: Clone + IntoIterator<Item = N>> Driven<N> for Drives<I> {
    fn drive(&self, x: &Tensor) -> Tensor {
        self.0.clone().into_iter().fold(x.shallow_clone(), |x, by| x + by.into())
    }
}

#[test]
fn each_runs_the_method_of_its_trait() {
    let net = Net { layer: Add(1.0) };
    let by = 5.0;
    let world = World(&by);
    let outputs = with_rollout!(|rollout| {
        let x = scalar(2.0);
        [
            net.forward_replay(&rollout, &x).unwrap(),
            net.other_replay(&rollout, &x).unwrap(),
            Trained.again(&rollout, &x, true).unwrap(),
            world.step_replay(&rollout, &x, 0.5, 2.0).unwrap(),
            World::pure_replay(&rollout, &x).unwrap(),
            world.reset(&x),
            Drives([1.5f32, 2.5]).drive_replay(&rollout, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [3.0, 2.0, 12.0, 10.5, 102.0, 2.0, 6.0]);
}
