//! Lifetimes of the impl, of the method, and one that is called as ours would be.

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

struct View<'a> {
    by: &'a f64,
}

impl<'a> View<'a> {
    #[replay_block]
    fn elided(&self, x: &Tensor) -> Tensor {
        x + *self.by
    }

    #[replay_block]
    fn of_the_impl(&'a self, x: &Tensor) -> Tensor {
        x + *self.by
    }

    #[replay_block]
    #[allow(clippy::needless_lifetimes, clippy::extra_unused_lifetimes)]
    fn of_the_method<'b>(&'b self, x: &'b Tensor) -> Tensor {
        x + *self.by
    }

    #[replay_block]
    #[allow(clippy::needless_lifetimes)]
    fn of_the_receiver_only<'b>(&'b self, x: &Tensor) -> Tensor {
        x + *self.by
    }

    #[replay_block]
    #[allow(clippy::needless_lifetimes, clippy::needless_arbitrary_self_type)]
    fn typed_receiver<'b>(self: &'b Self, x: &Tensor) -> Tensor {
        x + *self.by
    }

    #[replay_block]
    fn taken<'rollout>(&self, x: &'rollout Tensor, y: &'rollout Tensor) -> Tensor {
        x + y + *self.by
    }

    #[replay_block]
    fn related<'b, 'c: 'b>(&'b self, x: &'c Tensor, y: Option<&'b Tensor>) -> Tensor
    where
        'a: 'b,
    {
        y.map_or_else(|| x + *self.by, |y| x + y)
    }
}

#[replay_block]
fn free<'a>(x: &'a Tensor, y: &'a Tensor) -> Tensor {
    x + y
}

#[test]
fn each_borrows_as_it_says() {
    let by = 1.0;
    let view = View { by: &by };
    let outputs = with_rollout!(|rollout| {
        let x = scalar(1.0);
        [
            view.elided_replay(&rollout, &x).unwrap(),
            view.of_the_impl_replay(&rollout, &x).unwrap(),
            view.of_the_method_replay(&rollout, &x).unwrap(),
            view.of_the_receiver_only_replay(&rollout, &x).unwrap(),
            view.typed_receiver_replay(&rollout, &x).unwrap(),
            view.taken_replay(&rollout, &x, &x).unwrap(),
            view.related_replay(&rollout, &x, None).unwrap(),
            free_replay(&rollout, &x, &x).unwrap(),
        ]
    });
    assert_eq!(outputs.map(|output| value(&output)), [2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 2.0, 2.0]);
}

#[test]
fn an_input_may_live_shorter_than_the_rollout() {
    let by = 1.0;
    let view = View { by: &by };
    with_rollout!(|rollout| {
        let output = {
            let short = scalar(1.0);
            view.of_the_method_replay(&rollout, &short).unwrap()
        };
        assert!((value(&output) - 2.0).abs() < f64::EPSILON);
    });
}
