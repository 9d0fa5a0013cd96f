//! Guarantee *accumulation*, where nothing arrives: a gradient that was `None` stays `None`, one that was there stays
//! as it is, with and without the transaction, in the parameters' own kind and in a wider one.

use replay_runtime::{Rollout, RolloutBuilder};
use replay_tests::{randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

/// Two weights of which the second one is not to be reached.
struct Model {
    vs: nn::VarStore,
    used: Tensor,
    idle: Tensor,
}

impl Model {
    fn new(kind: Kind, old: bool) -> Self {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let used = vs.root().var_copy("used", &randn(1, &[4, 4], Kind::Float));
        let idle = vs.root().var_copy("idle", &randn(2, &[4, 4], Kind::Float));
        vs.set_kind(kind);
        if old {
            ((&used + &idle) * 3.0).sum(kind).backward();
        }
        Self { vs, used, idle }
    }

    fn x(&self) -> Tensor {
        randn(3, &[2, 4], Kind::Float).to_kind(self.used.kind())
    }
}

type Program = for<'m> fn(&Rollout<'m>, &'m Model) -> Tensor;

/// For every setting: `program` reaches one weight and not the other.
fn assert_idle(program: Program) {
    for kind in [Kind::Float, Kind::BFloat16] {
        for old in [false, true] {
            for restore in [true, false] {
                for wide in [None, Some(Kind::Float), Some(Kind::Double)] {
                    let model = Model::new(kind, old);
                    let before = old.then(|| model.idle.grad().copy());
                    let address = old.then(|| model.idle.grad().data_ptr());
                    let builder = Rollout::builder(&model.vs).restore_gradients(restore);
                    let builder = match wide {
                        Some(kind) => RolloutBuilder::accumulate_in(builder, kind),
                        None => builder,
                    };
                    let rollout = builder.build();
                    let loss = program(&rollout, &model).to_kind(Kind::Float).sum(Kind::Float);
                    rollout.backward(&loss).unwrap();
                    assert!(model.used.grad().defined());
                    let case = format!("{kind:?} old {old} restore {restore} in {wide:?}");
                    let grad = model.idle.grad();
                    assert_eq!(grad.defined(), old, "{case}");
                    let Some(before) = before else { continue };
                    assert!(same_bits(&grad.to_kind(kind), &before), "{case}");
                    // What is added to at once is made wide enough before anything arrives.
                    let trained = model.idle.requires_grad();
                    let widened = trained && !restore && wide.is_some_and(|wide| wide != kind);
                    assert_eq!(Some(grad.data_ptr()) != address, widened, "{case}");
                }
            }
        }
    }
}

#[test]
fn beyond_a_truncation() {
    assert_idle(|rollout, model| {
        let h = rollout.block("first", &[("x", &model.x())], |_, i| i[0].matmul(&model.idle).tanh()).unwrap();
        rollout.block("second", &[("h", &h.detach())], |_, i| i[0].matmul(&model.used).tanh()).unwrap()
    });
}

#[test]
fn beyond_a_truncation_inside_a_block() {
    assert_idle(|rollout, model| {
        let body = |_: &Rollout<'_>, i: &[Tensor]| i[0].matmul(&model.idle).tanh().detach().matmul(&model.used);
        rollout.block("cut", &[("x", &model.x())], body).unwrap()
    });
}

#[test]
fn behind_an_output_that_is_not_used() {
    assert_idle(|rollout, model| {
        let body = |_: &Rollout<'_>, i: &[Tensor]| (i[0].matmul(&model.used), i[0].matmul(&model.idle));
        rollout.block("pair", &[("x", &model.x())], body).unwrap().0
    });
}

#[test]
fn behind_a_block_that_is_not_used() {
    assert_idle(|rollout, model| {
        let _ = rollout.block("aside", &[("x", &model.x())], |_, i| i[0].matmul(&model.idle)).unwrap();
        rollout.block("step", &[("x", &model.x())], |_, i| i[0].matmul(&model.used)).unwrap()
    });
}

#[test]
fn as_an_input_that_the_block_detaches() {
    assert_idle(|rollout, model| {
        let inputs = [("x", &model.x()), ("idle", &model.idle)];
        let body = |_: &Rollout<'_>, i: &[Tensor]| i[0].matmul(&i[1].detach()).matmul(&model.used);
        rollout.block("detaches", &inputs, body).unwrap()
    });
}

#[test]
fn as_an_input_of_an_inner_block_behind_an_unused_output() {
    assert_idle(|rollout, model| {
        let outer = |rollout: &Rollout<'_>, i: &[Tensor]| {
            let body = |_: &Rollout<'_>, i: &[Tensor]| (i[0].sin(), i[1].cos());
            let (y, _) = rollout.block("inner", &[("x", &i[0]), ("idle", &i[1])], body)?;
            Ok::<_, replay_runtime::ReplayError>(y.matmul(&model.used))
        };
        rollout.block("outer", &[("x", &model.x()), ("idle", &model.idle)], outer).unwrap()
    });
}

#[test]
fn where_it_is_frozen() {
    assert_idle(|rollout, model| {
        let _ = model.idle.set_requires_grad(false);
        let body = |_: &Rollout<'_>, i: &[Tensor]| i[0].matmul(&model.idle).matmul(&model.used);
        rollout.block("frozen", &[("x", &model.x())], body).unwrap()
    });
}
