//! `context = path`: called with the receiver where there is one.

use replay_runtime::{BoxError, ReplayContext, replay_block};
use tch::Tensor;

use crate::{scalar, value};

struct Scope;

impl ReplayContext for Scope {
    type Scope<'s> = ();

    fn forward(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn replay(&self) -> Result<(), BoxError> {
        Ok(())
    }
}

struct World;

fn scope_of(_: &World) -> Scope {
    Scope
}

fn scope() -> Scope {
    Scope
}

impl World {
    fn own(&self) -> Scope {
        Scope
    }

    fn borrowed(&self) -> Borrowed<'_> {
        Borrowed(self)
    }

    #[replay_block(context = scope_of)]
    fn by_function(&self, x: &Tensor) -> Tensor {
        x + 1.0
    }

    #[replay_block(context = Self::own, name = "by_method_again")]
    fn by_method(&self, x: &Tensor) -> Tensor {
        x + 2.0
    }

    #[replay_block(context = Self::borrowed)]
    fn by_borrow(&self, x: &Tensor) -> Tensor {
        x + 3.0
    }
}

struct Borrowed<'m>(&'m World);

impl ReplayContext for Borrowed<'_> {
    type Scope<'s>
        = &'s World
    where
        Self: 's;

    fn forward(&self) -> Result<&World, BoxError> {
        Ok(self.0)
    }

    fn replay(&self) -> Result<&World, BoxError> {
        Ok(self.0)
    }
}

#[replay_block(context = scope)]
fn free(x: &Tensor) -> Tensor {
    x + 4.0
}

#[test]
fn each_finds_its_context() {
    let world = World;
    let outputs = with_rollout!(|rollout| {
        let x = scalar(0.0);
        [
            world.by_function_replay(&rollout, &x).unwrap(),
            world.by_method_again(&rollout, &x).unwrap(),
            world.by_borrow_replay(&rollout, &x).unwrap(),
            free_replay(&rollout, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [1.0, 2.0, 3.0, 4.0]);
}
