//! Attributes of other crates and of the language on the same method, above and below ours.

use std::sync::atomic::{AtomicUsize, Ordering};

use replay_runtime::{Rollout, replay_block};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::{scalar, value};

#[derive(Debug)]
struct World {
    weight: Tensor,
}

impl World {
    #[tracing::instrument(skip_all, fields(times))]
    #[replay_block]
    fn above(&self, state: &Tensor, #[meta] times: f64) -> Tensor {
        state * &self.weight * times
    }

    #[replay_block]
    #[tracing::instrument(skip(self, state), err)]
    fn below(&self, state: &Tensor, #[meta] times: f64) -> Result<Tensor, String> {
        Ok(state * &self.weight * times)
    }
}

#[replay_block]
impl Module for World {
    #[tracing::instrument(level = "info")]
    fn forward(&self, xs: &Tensor) -> Tensor {
        xs * &self.weight
    }
}

#[tracing::instrument]
#[replay_block]
fn free(state: &Tensor) -> Tensor {
    state + 1.0
}

static SPANS: AtomicUsize = AtomicUsize::new(0);

/// Counts the spans that are entered.
struct Count;

impl Subscriber for Count {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {
        SPANS.fetch_add(1, Ordering::Relaxed);
    }

    fn exit(&self, _: &Id) {}
}

#[test]
fn an_instrumented_block_has_a_span_in_its_forward_and_one_in_its_replay() {
    let vs = nn::VarStore::new(Device::Cpu);
    let world = World { weight: vs.root().ones("weight", &[1]) };
    let entered = || SPANS.load(Ordering::Relaxed);
    tracing::subscriber::with_default(Count, || {
        let rollout = Rollout::new(&vs);
        let state = world.above_replay(&rollout, &scalar(1.0), 2.0).unwrap();
        let state = world.below_replay(&rollout, &state, 3.0).unwrap();
        let state = world.forward_replay(&rollout, &state).unwrap();
        let state = free_replay(&rollout, &state).unwrap();
        assert_eq!(entered(), 4);
        rollout.backward(&state.sum(Kind::Float)).unwrap();
        assert_eq!(entered(), 8);
    });
    assert!((value(&world.weight.grad()) - 18.0).abs() < f64::EPSILON);
}
