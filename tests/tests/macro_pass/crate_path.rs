//! `crate = path`: a renamed dependency, and a facade that re-exports the runtime.

use tch::Tensor;

use crate::{scalar, value};

mod facade {
    pub(super) mod inner {
        pub(crate) use replay_runtime::*;
    }
}

#[renamed::replay_block(crate = ::renamed)]
fn by_other_name(x: &Tensor) -> Tensor {
    x + 1.0
}

#[renamed::replay_block(crate = crate::crate_path::facade::inner)]
fn by_facade(x: &Tensor) -> Tensor {
    x + 2.0
}

struct World;

#[renamed::replay_block(crate = ::renamed)]
impl World {
    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + 3.0
    }
}

#[test]
fn each_finds_the_runtime() {
    let world = World;
    let outputs = with_rollout!(|rollout| {
        let x = scalar(0.0);
        [
            by_other_name_replay(&rollout, &x).unwrap(),
            by_facade_replay(&rollout, &x).unwrap(),
            world.step_replay(&rollout, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [1.0, 2.0, 3.0]);
}
