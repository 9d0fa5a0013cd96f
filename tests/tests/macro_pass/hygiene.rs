//! Names of the user's own never meet those of the generated code.
#![allow(unused_imports, dead_code, non_camel_case_types, non_upper_case_globals)]

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

mod std {}
mod core {}
mod tch_shadow {}

struct Result;
struct Option;
struct Vec;
struct Box;
struct Clone;
struct BlockInfo;
struct Rollout;
struct ReplayError;

fn input() {}
fn next_input() {}
fn run() {}

const LIMIT: f64 = 1.0;

struct World;

impl World {
    #[allow(clippy::too_many_arguments)]
    #[replay_block]
    fn step(
        &self,
        rollout: &Tensor,
        replay_rollout: &Tensor,
        inputs: &Tensor,
        leaves: &Tensor,
        self_: &Tensor,
        block: &Tensor,
        __replay_inputs: &Tensor,
        __replay_leaves: &Tensor,
        __replay_rollout: &Tensor,
        r#type: &Tensor,
        #[meta] body: f64,
        #[meta] __replay_block: f64,
    ) -> Tensor {
        rollout
            + replay_rollout
            + inputs
            + leaves
            + self_
            + block
            + __replay_inputs
            + __replay_leaves
            + __replay_rollout
            + r#type
            + body
            + __replay_block
    }

    /// A local glob import in the body keeps its own scope.
    #[replay_block]
    fn local_import(&self, x: &Tensor) -> Tensor {
        use inner::*;
        let _: Marker = input;
        x + LIMIT
    }

    #[replay_block]
    fn r#loop(&self, x: &Tensor) -> Tensor {
        x + 5.0
    }
}

mod inner {
    pub(super) type Marker = u8;
    pub(super) const input: u8 = 1;
}

#[test]
fn parameters_keep_their_order() {
    let world = World;
    let x = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0].map(scalar);
    let [a, b, c, d, e, f, g, h, i, j] = &x;
    let outputs = with_rollout!(|rollout| [
        world.step_replay(&rollout, a, b, c, d, e, f, g, h, i, j, 512.0, 1024.0).unwrap(),
        world.local_import_replay(&rollout, a).unwrap(),
        world.loop_replay(&rollout, a).unwrap(),
    ]);
    assert_eq!(outputs.map(|output| value(&output)), [2047.0, 1.0, 5.0]);
}
