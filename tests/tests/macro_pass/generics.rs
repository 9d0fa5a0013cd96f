//! Type and const parameters, bounds, where clauses, and a type parameter as output.

use replay_runtime::{ReplayOutput, replay_block};
use tch::Tensor;

use crate::{scalar, value};

trait Layer {
    fn apply(&self, x: &Tensor) -> Tensor;
}

struct Add(f64);

impl Layer for Add {
    fn apply(&self, x: &Tensor) -> Tensor {
        x + self.0
    }
}

struct Net<L, const DEPTH: usize> {
    layer: L,
}

impl<L, const DEPTH: usize> Net<L, DEPTH>
where
    L: Layer,
{
    #[replay_block]
    fn step<const K: usize, N: Into<f64> + Clone + Send + 'static>(&self, x: &Tensor, #[meta] by: N) -> Tensor {
        let mut x = self.layer.apply(x);
        for _ in 0..DEPTH + K {
            x = x + by.clone().into();
        }
        x
    }

    #[replay_block]
    fn with_where<N>(&self, x: &Tensor, #[meta] by: N) -> Tensor
    where
        N: Into<f64> + Clone + Send + 'static,
    {
        self.layer.apply(x) + by.into()
    }

    #[replay_block]
    fn any_output<R>(&self, x: &Tensor) -> R
    where
        R: ReplayOutput + From<Tensor>,
    {
        self.layer.apply(x).into()
    }

    #[replay_block]
    fn argument_position(&self, x: &Tensor, #[meta] by: impl Fn(&Tensor) -> Tensor + Clone + Send + 'static) -> Tensor {
        by(&self.layer.apply(x))
    }
}

/// An unsized receiver.
trait Dynamic {
    fn layer(&self) -> &dyn Layer;
}

impl Dynamic for Add {
    fn layer(&self) -> &dyn Layer {
        self
    }
}

impl dyn Dynamic + '_ {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        self.layer().apply(x)
    }
}

#[test]
fn parameters_are_passed_on() {
    let net = Net::<_, 2> { layer: Add(1.0) };
    let outputs = with_rollout!(|rollout| {
        let x = scalar(0.0);
        [
            net.step_replay::<3, f32>(&rollout, &x, 2.0).unwrap(),
            net.with_where_replay(&rollout, &x, 5_i32).unwrap(),
            net.any_output_replay::<Tensor>(&rollout, &x).unwrap(),
            net.argument_position_replay(&rollout, &x, |x| x * 7.0).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [11.0, 6.0, 1.0, 7.0]);
}

#[test]
fn a_trait_object_is_a_receiver() {
    let add = Add(1.0);
    let dynamic: &dyn Dynamic = &add;
    let output = with_rollout!(|rollout| dynamic.step_replay(&rollout, &scalar(1.0)).unwrap());
    assert!((value(&output) - 2.0).abs() < f64::EPSILON);
}
