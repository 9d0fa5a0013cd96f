//! Bodies that fail: any error that turns into a boxed one.
#![allow(unused_qualifications)]

use std::error::Error;

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

struct World;

impl World {
    #[replay_block]
    fn boxed(&self, x: &Tensor) -> Result<Tensor, Box<dyn Error + Send + Sync>> {
        let by: f64 = "2".parse()?;
        Ok(x * by)
    }

    #[replay_block]
    fn any(&self, x: &Tensor, #[meta] text: String) -> anyhow::Result<(Tensor, Tensor)> {
        let by: f64 = text.parse()?;
        if by > 2.0 {
            anyhow::bail!("{by} is too much");
        }
        Ok((x * by, x + by))
    }

    #[replay_block]
    fn text(&self, x: &Tensor, #[meta] fails: bool) -> std::result::Result<Tensor, String> {
        if fails {
            return Err("by order".to_owned());
        }
        Ok(x + 1.0)
    }
}

#[test]
fn an_ok_comes_back() {
    let world = World;
    with_rollout!(|rollout| {
        let x = scalar(1.0);
        let (first, second) = world.any_replay(&rollout, &x, "1.5".to_owned()).unwrap();
        let third = world.boxed_replay(&rollout, &x).unwrap();
        let fourth = world.text_replay(&rollout, &x, false).unwrap();
        assert_eq!([first, second, third, fourth].map(|output| value(&output)), [1.5, 2.5, 2.0, 2.0]);
    });
}

#[test]
fn an_error_is_the_source() {
    let world = World;
    with_rollout!(|rollout| {
        let x = scalar(1.0);
        let chain = |error: &dyn Error| {
            let (mut text, mut next) = (error.to_string(), error.source());
            while let Some(error) = next {
                text = format!("{text}: {error}");
                next = error.source();
            }
            text
        };
        let error = world.any_replay(&rollout, &x, "3".to_owned()).unwrap_err();
        assert!(chain(&error).contains("3 is too much"), "{}", chain(&error));
        let error = world.text_replay(&rollout, &x, true).unwrap_err();
        assert!(chain(&error).contains("by order"), "{}", chain(&error));
    });
}
