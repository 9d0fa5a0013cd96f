//! Every form of an input and of an output.
#![allow(unused_qualifications)]

use replay_runtime::replay_block;
use tch::Tensor;

use crate::{scalar, value};

type State = Tensor;
type Pair = (Tensor, Tensor);

struct World {
    shift: f64,
}

impl World {
    #[replay_block]
    fn inputs(
        &self,
        borrowed: &Tensor,
        owned: Tensor,
        maybe: Option<&Tensor>,
        maybe_owned: Option<Tensor>,
        #[meta] data: Vec<f64>,
    ) -> Tensor {
        let mut sum = borrowed + owned + self.shift;
        for input in [maybe, maybe_owned.as_ref()].into_iter().flatten() {
            sum = sum + input;
        }
        sum * data[0]
    }

    #[replay_block]
    fn mutable(&self, mut x: Tensor, mut y: &Tensor, #[meta] mut times: u8) -> Tensor {
        let first = y;
        while times > 0 {
            x = x + y;
            y = first;
            times -= 1;
        }
        x
    }

    #[replay_block]
    fn aliases(&self, state: &State, other: State) -> Pair {
        (state + self.shift, other)
    }

    #[replay_block]
    fn single(&self, x: &tch::Tensor) -> (Tensor,) {
        (x + self.shift,)
    }

    #[replay_block]
    fn many(
        &self,
        x: &Tensor,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, State, tch::Tensor) {
        let y = |by: f64| x + by;
        (y(0.), y(1.), y(2.), y(3.), y(4.), y(5.), y(6.), y(7.), y(8.), y(9.), y(10.), y(11.))
    }

    #[replay_block]
    #[rustfmt::skip]
    #[allow(unused_parens, clippy::needless_arbitrary_self_type)]
    fn parenthesised(self: &Self, x: (&Tensor)) -> (Tensor) {
        x + self.shift
    }
}

#[test]
fn inputs_come_back_as_they_were() {
    let world = World { shift: 0.5 };
    let x = scalar(1.0);
    let outputs = with_rollout!(|rollout| [
        world.inputs_replay(&rollout, &x, scalar(2.0), Some(&x), Some(scalar(4.0)), vec![2.0]).unwrap(),
        world.inputs_replay(&rollout, &x, scalar(2.0), None, None, vec![3.0]).unwrap(),
        world.mutable_replay(&rollout, scalar(1.0), &scalar(10.0), 2).unwrap(),
        world.parenthesised_replay(&rollout, &x).unwrap(),
    ]);
    assert_eq!(outputs.map(|output| value(&output)), [17.0, 10.5, 21.0, 1.5]);
}

#[test]
fn outputs_keep_their_type() {
    let world = World { shift: 0.5 };
    let x = scalar(1.0);
    with_rollout!(|rollout| {
        let (first, second): Pair = world.aliases_replay(&rollout, &x, scalar(3.0)).unwrap();
        let (single,): (Tensor,) = world.single_replay(&rollout, &x).unwrap();
        let last: Tensor = world.many_replay(&rollout, &x).unwrap().11;
        assert_eq!([first, second, single, last].map(|output| value(&output)), [1.5, 3.0, 1.5, 12.0]);
    });
}
