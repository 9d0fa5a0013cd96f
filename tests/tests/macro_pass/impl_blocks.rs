//! The attribute on an inherent impl: only marked methods are blocks, and everything else stays.

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

struct World<T> {
    by: T,
}

#[replay_block]
impl<T: Copy + Into<f64>> World<T> {
    #![allow(clippy::needless_pass_by_value)]

    const SHIFT: f64 = 1.0;

    pub(crate) const fn new(by: T) -> Self {
        Self { by }
    }

    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + self.by.into() + Self::SHIFT
    }

    #[replay_runtime::replay_block(name = "twice_again")]
    fn twice(&self, x: &Tensor) -> Result<Tensor, tch::TchError> {
        Ok(self.step(&self.step(x)))
    }

    fn plain(&self, x: &Tensor) -> Tensor {
        self.step(x)
    }
}

#[test]
fn marked_methods_are_blocks() {
    let world = World::new(2.0_f32);
    let outputs = with_rollout!(|rollout| {
        let x = scalar(0.0);
        [world.step_replay(&rollout, &x).unwrap(), world.twice_again(&rollout, &x).unwrap(), world.plain(&x)]
    });
    assert_eq!(outputs.map(|output| value(&output)), [3.0, 6.0, 3.0]);
}

#[test]
fn the_registry_names_the_type() {
    let blocks = replay_runtime::blocks();
    let names = blocks.iter().filter(|block| block.module().ends_with("impl_blocks")).map(|block| block.name());
    assert_eq!(names.collect::<Vec<_>>(), ["World::step", "World::twice"]);
}
