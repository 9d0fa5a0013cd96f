//! Tensors and results by other names, and types of the user's own by theirs.

#![allow(unused_qualifications, reason = "the other names are what is tested")]

use replay_runtime::replay_block;
use tch::Tensor as T;

use crate::{scalar, value};

type State = ::tch::Tensor;
type Borrowed<'a> = &'a State;
type Maybe<'a> = Option<&'a T>;
type Outcome<V = T> = Result<V, String>;

mod reexport {
    pub(super) use ::tch;
}

#[allow(dead_code)]
struct Tensor;
struct World(f64);

mod own {
    use tch::Tensor;

    /// Its argument is not the value.
    pub(super) type Result<E = String> = std::result::Result<Tensor, E>;
}

impl World {
    #[replay_block]
    fn renamed(&self, x: &T, y: T, maybe: Option<&T>, owned: Option<State>) -> T {
        let sum = x + y + self.0;
        [maybe, owned.as_ref()].into_iter().flatten().fold(sum, |sum, input| sum + input)
    }

    #[replay_block]
    fn aliased(&self, x: Borrowed<'_>, maybe: Maybe<'_>) -> Outcome {
        maybe.map_or_else(|| Err("nothing".to_owned()), |maybe| Ok(x + maybe))
    }

    #[replay_block]
    fn tuple(&self, x: &State) -> Outcome<(T, State)> {
        Ok((x + self.0, x - self.0))
    }

    #[replay_block]
    fn result_without_arguments(&self, x: &T) -> own::Result {
        Ok(x + self.0)
    }

    #[replay_block]
    fn error_as_argument(&self, x: &T) -> own::Result<std::fmt::Error> {
        Ok(x - self.0)
    }

    #[replay_block]
    fn by_path(&self, x: &::tch::Tensor, y: &reexport::tch::Tensor, z: Option<&tch::Tensor>) -> reexport::tch::Tensor {
        z.map_or_else(|| x + y, |z| x * z)
    }
}

#[test]
fn the_runtime_knows_tensors_by_their_type() {
    let world = World(0.5);
    with_rollout!(|rollout| {
        let x = scalar(1.0);
        let outputs = [
            world.renamed_replay(&rollout, &x, scalar(2.0), Some(&x), Some(scalar(4.0))).unwrap(),
            world.renamed_replay(&rollout, &x, scalar(2.0), None, None).unwrap(),
            world.aliased_replay(&rollout, &x, Some(&x)).unwrap(),
            world.tuple_replay(&rollout, &x).unwrap().1,
            world.result_without_arguments_replay(&rollout, &x).unwrap(),
            world.error_as_argument_replay(&rollout, &x).unwrap(),
            world.by_path_replay(&rollout, &x, &x, None).unwrap(),
        ];
        assert_eq!(outputs.map(|output| value(&output)), [8.5, 3.5, 2.0, 0.5, 1.5, 0.5, 2.0]);
        assert!(world.aliased_replay(&rollout, &x, None).unwrap_err().to_string().contains("nothing"));
    });
}
