//! What a method's attributes say of its signature holds for the sibling too; what they say of its body does not.
#![deny(warnings, clippy::all, clippy::pedantic)]
#![allow(clippy::float_cmp, clippy::unused_self, reason = "the values are exact, the shape is what is tested")]

use replay_runtime::replay_block;
use tch::Tensor;
use tch::nn::Module;

use crate::{scalar, value};

#[derive(Debug)]
struct World;

impl World {
    #[replay_block]
    #[expect(non_snake_case, reason = "as in the paper")]
    fn Step(&self, X: &Tensor) -> Tensor {
        X + 1.0
    }

    #[allow(non_snake_case, reason = "as in the paper")]
    #[replay_block]
    fn rescale(&self, Z_t: &Tensor, #[meta] S: f64) -> Tensor {
        Z_t * S
    }

    #[replay_block]
    #[expect(clippy::wrong_self_convention, clippy::fn_params_excessive_bools, reason = "the names are given")]
    fn from_pixels(
        &self,
        x: &Tensor,
        #[meta] flip: bool,
        #[meta] pad: bool,
        #[meta] mean: bool,
        #[meta] std: bool,
    ) -> Tensor {
        x + 2.0 + f64::from(flip) + f64::from(pad) + f64::from(mean) + f64::from(std)
    }

    #[replay_block]
    #[allow(dead_code, reason = "for later")]
    fn later(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }

    #[replay_block]
    #[inline]
    #[cold]
    #[track_caller]
    #[must_use = "it has no other effect"]
    fn of_the_body(&self, x: &Tensor) -> Tensor {
        x + 4.0
    }

    #[replay_block]
    #[cfg_attr(all(), cfg(any()))]
    fn never(&self, x: &Tensor) -> NoSuchType {
        x + 1.0
    }

    #[cfg_attr(all(), cfg(any()))]
    #[replay_block]
    fn never_either(&self, x: &Tensor) -> NoSuchType {
        x + 1.0
    }
}

/// What comes below the attribute reaches it.
#[replay_block]
#[cfg(any())]
impl Module for NoSuchType {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + 1.0
    }
}

#[replay_block]
#[cfg_attr(all(), cfg(any()))]
impl Module for NoSuchType {
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs + 1.0
    }
}

#[replay_block]
#[expect(non_snake_case, reason = "as in the paper")]
impl Module for World {
    fn forward(&self, X: &Tensor) -> Tensor {
        X + 3.0
    }
}

mod inner {
    #[derive(Debug)]
    pub(super) struct Inner;
}

#[replay_block]
impl Module for inner::Inner {
    #![allow(non_snake_case, reason = "as in the paper")]

    fn forward(&self, X: &Tensor) -> Tensor {
        X + 5.0
    }
}

/// A trait settles how its methods look: lints have nothing to say about them, nor about their siblings.
mod settled {
    use replay_runtime::replay_block;
    use tch::Tensor;

    pub(super) trait Rules {
        #[expect(
            clippy::box_collection,
            clippy::fn_params_excessive_bools,
            clippy::option_option,
            clippy::too_many_arguments,
            clippy::wrong_self_convention,
            reason = "as many as there are"
        )]
        fn from_all(
            &self,
            x: &Tensor,
            flip: bool,
            pad: bool,
            mean: bool,
            std: bool,
            maybe: Option<Option<f64>>,
            list: Box<Vec<f64>>,
        ) -> Tensor;
    }

    pub(super) struct World;

    #[replay_block]
    impl Rules for World {
        fn from_all(
            &self,
            x: &Tensor,
            #[meta] flip: bool,
            #[meta] pad: bool,
            #[meta] mean: bool,
            #[meta] std: bool,
            #[meta] maybe: Option<Option<f64>>,
            #[meta] list: Box<Vec<f64>>,
        ) -> Tensor {
            let flags = [flip, pad, mean, std].map(f64::from).iter().sum::<f64>();
            x + flags + maybe.flatten().unwrap_or_default() + list[0]
        }
    }
}

/// Only a caller with the feature may call either.
#[cfg(target_arch = "x86_64")]
mod features {
    use replay_runtime::{ReplayError, Rollout, replay_block};
    use tch::Tensor;

    pub(super) struct Fast;

    impl Fast {
        #[replay_block]
        #[target_feature(enable = "avx2,fma")]
        fn step(&self, x: &Tensor) -> Tensor {
            x + 1.0
        }

        #[allow(dead_code, reason = "a caller would have to prove that the feature is there")]
        #[target_feature(enable = "avx2,fma")]
        pub(super) fn both<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
            self.step_replay(rollout, &self.step(x))
        }
    }
}

#[test]
fn siblings_run() {
    let (world, inner) = (World, inner::Inner);
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [
            world.Step_replay(&rollout, &x).unwrap(),
            world.rescale_replay(&rollout, &x, 3.0).unwrap(),
            world.forward_replay(&rollout, &x).unwrap(),
            world.of_the_body_replay(&rollout, &x).unwrap(),
            inner.forward_replay(&rollout, &x).unwrap(),
            world.from_pixels_replay(&rollout, &x, true, true, true, true).unwrap(),
            settled::World.from_all_replay(&rollout, &x, true, true, true, true, None, Box::new(vec![3.0])).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
}
