//! Functions without a receiver: free, associated, and associated without a word that says so.

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

#[replay_block]
fn double(x: &Tensor) -> Tensor {
    x * 2.0
}

struct Scale;

impl Scale {
    const BY: f64 = 3.0;

    #[replay_block]
    fn triple(x: &Tensor) -> Tensor {
        x * Self::BY
    }
}

#[replay_block]
impl Scale {
    #[replay_block]
    fn again(x: &Tensor) -> Tensor {
        x * 4.0
    }
}

#[test]
fn each_reaches_its_own_function() {
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [
            double_replay(&rollout, &x).unwrap(),
            Scale::triple_replay(&rollout, &x).unwrap(),
            Scale::again_replay(&rollout, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [2.0, 3.0, 4.0]);
}

#[test]
fn the_functions_themselves_stay() {
    let x = scalar(1.0);
    assert_eq!([double(&x), Scale::triple(&x), Scale::again(&x)].map(|output| value(&output)), [2.0, 3.0, 4.0]);
}
