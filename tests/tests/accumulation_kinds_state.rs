//! Guarantee *accumulation*, in a wider kind: what `accumulate_in` leaves behind, whoever differentiates or steps next,
//! and what it refuses.

use std::panic::{AssertUnwindSafe, catch_unwind};

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::narrow::{chain, start, start_grad, step, store, tail};
use replay_tests::{randn, same_bits};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

/// tch's optimizers take a gradient that is wider than its parameter.
#[test]
fn optimizers_take_wide_gradients() {
    fn trained(config: impl OptimizerConfig, wide: bool) -> Tensor {
        let (vs, w) = store(Kind::BFloat16);
        let mut optimizer = config.build(&vs, 1e-2).unwrap();
        for _ in 0..3 {
            optimizer.zero_grad();
            let builder = Rollout::builder(&vs);
            let rollout = if wide { builder.accumulate_in(Kind::Float).build() } else { builder.build() };
            let loss = chain(&rollout, &w);
            rollout.backward(&loss).unwrap();
            optimizer.clip_grad_norm(1.0);
            optimizer.step();
        }
        assert_eq!(w.kind(), Kind::BFloat16);
        w.detach().to_kind(Kind::Float)
    }
    fn close(config: impl OptimizerConfig + Copy) {
        let (_, untrained) = store(Kind::BFloat16);
        let (wide, narrow) = (trained(config, true), trained(config, false));
        assert!(wide.allclose(&narrow, 0.02, 0.02, false));
        assert!(!wide.equal(&untrained.to_kind(Kind::Float)));
    }
    close(nn::Sgd::default());
    close(nn::Sgd { momentum: 0.9, wd: 0.01, ..Default::default() });
    close(nn::Adam::default());
    close(nn::AdamW::default());
    close(nn::RmsProp { momentum: 0.9, centered: true, ..Default::default() });
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Success,
    Error,
    Panic,
}

/// A graph that was made before keeps the leaf's accumulator alive: it takes gradients of the leaf's own kind again.
#[test]
fn the_leafs_own_kind_comes_back_whatever_happens() {
    for end in [End::Success, End::Error, End::Panic] {
        for restore in [true, false] {
            for old in [true, false] {
                ends_as_it_was(end, restore, old);
            }
        }
    }
}

fn ends_as_it_was(end: End, restore: bool, old: bool) {
    let (vs, mut w) = store(Kind::BFloat16);
    let kept = (&w * 2.0).sum(Kind::BFloat16);
    let old = old.then(|| start_grad(&w, Kind::BFloat16, true));
    let held = w.shallow_clone();
    let body = move |_: &Rollout<'_>, i: &[Tensor]| match end {
        End::Error if is_replaying() => Err("no second time"),
        End::Panic if is_replaying() => std::panic::panic_any("no second time"),
        _ => Ok(step(&i[0], &held)),
    };
    let rollout = Rollout::builder(&vs).restore_gradients(restore).accumulate_in(Kind::Float).build();
    let h = rollout.block("fails", &[("x", &start(w.kind()))], body).unwrap();
    let held = &w;
    let h = rollout.block("last", &[("h", &h)], move |_, i| step(&i[0], held)).unwrap();
    let loss = tail(&h, &w);
    let outcome = catch_unwind(AssertUnwindSafe(|| rollout.backward(&loss).is_ok()));
    assert_eq!(outcome.ok(), [Some(true), Some(false), None][end as usize], "{end:?}");
    match &old {
        Some(old) if restore && end != End::Success => assert_eq!(w.grad().data_ptr(), old.data_ptr()),
        None if restore && end != End::Success => assert!(!w.grad().defined()),
        _ => assert_eq!(w.grad().kind(), Kind::Float),
    }
    w.zero_grad();
    let mut other = w.shallow_clone();
    other.set_data(&w.detach());
    drop(nn::Sgd::default().build(&vs, 0.0).map(|mut optimizer| optimizer.zero_grad()));
    assert!(!w.grad().defined());
    kept.backward();
    assert_eq!(w.grad().kind(), Kind::BFloat16, "{end:?} {restore} {}", old.is_some());
}

/// A rollout inside a body of another, and each with its own choice.
#[test]
fn rollouts_inside_rollouts_each_have_their_kind() {
    let (vs, w) = store(Kind::BFloat16);
    let kept = (&w * 2.0).sum(Kind::BFloat16);
    let (store, held) = (&vs, &w);
    let rollout = Rollout::builder(&vs).accumulate_in(Kind::Float).build();
    let x = start(w.kind());
    let y = rollout
        .block("outer", &[("x", &x)], move |_, i| {
            if is_replaying() {
                let own = Rollout::builder(store).accumulate_in(Kind::Double).build();
                let loss = held.get(0).sum(Kind::BFloat16);
                own.backward(&loss).unwrap();
                assert_eq!(held.grad().kind(), Kind::Double);
            }
            step(&i[0], held)
        })
        .unwrap();
    let y = rollout.block("last", &[("y", &y)], move |_, i| step(&i[0], held)).unwrap();
    rollout.backward(&y.to_kind(Kind::Float).sum(Kind::Float)).unwrap();
    assert_eq!(w.grad().kind(), Kind::Double);
    drop(nn::Sgd::default().build(&vs, 0.0).map(|mut optimizer| optimizer.zero_grad()));
    kept.backward();
    assert_eq!(w.grad().kind(), Kind::BFloat16);
}

#[test]
fn a_parameter_that_is_too_wide_is_an_error_that_names_it() {
    for (kind, sum) in
        [(Kind::Double, Kind::Float), (Kind::ComplexFloat, Kind::Float), (Kind::ComplexFloat, Kind::Double)]
    {
        let (vs, w) = store(Kind::BFloat16);
        let wide = vs.root().var_copy("wide", &randn(4, &[6], Kind::Float));
        let mut late = wide.shallow_clone();
        late.set_data(&wide.to_kind(kind));
        let kept = (&w * 2.0).sum(Kind::BFloat16);
        let old = start_grad(&w, Kind::BFloat16, true);
        let rollout = Rollout::builder(&vs).accumulate_in(sum).build();
        let loss = chain(&rollout, &w);
        let error = rollout.backward(&loss).unwrap_err();
        assert!(matches!(&error, ReplayError::AccumulateKind { variable, .. } if variable == "wide"), "{error}");
        assert!(error.to_string().contains(&format!("{kind:?}")));
        assert!(w.grad().data_ptr() == old.data_ptr() && same_bits(&w.grad(), &old));
        kept.backward();
        assert_eq!(w.grad().kind(), Kind::BFloat16);

        // One that is not trained does not matter.
        let _ = late.set_requires_grad(false);
        let rollout = Rollout::builder(&vs).accumulate_in(sum).build();
        let loss = chain(&rollout, &w);
        rollout.backward(&loss).unwrap();
    }
    let vs = nn::VarStore::new(Device::Cpu);
    let leaf = randn(1, &[3], Kind::Double).set_requires_grad(true);
    let error = Rollout::builder(&vs).accumulate_in(Kind::Float).build().backward(&leaf.sum(Kind::Double)).unwrap_err();
    assert!(error.to_string().contains("`leaf of shape [3]`"), "{error}");
}

#[test]
#[should_panic(expected = "gradients are added up in Float or Double, not in BFloat16")]
fn a_kind_that_is_no_wider_is_refused_by_the_builder() {
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = Rollout::builder(&vs).accumulate_in(Kind::BFloat16);
}

/// Accumulators that two threads change would not be put back as they were: the second one is told so.
#[test]
fn two_threads_do_not_widen_one_variable_at_once() {
    for restore in [true, false] {
        let (vs, w) = store(Kind::BFloat16);
        let store = &vs;
        let body = move |_: &Rollout<'_>, i: &[Tensor]| {
            if is_replaying() {
                let outcome = std::thread::scope(|scope| {
                    let other = move || {
                        let builder = Rollout::builder(store).restore_gradients(restore);
                        let loss = store.variables()["w"].sum(Kind::Float);
                        builder.accumulate_in(Kind::Float).build().backward(&loss).map(drop)
                    };
                    scope.spawn(other).join().unwrap()
                });
                assert!(matches!(outcome, Err(ReplayError::VariableShared { .. })), "{outcome:?}");
            }
            step(&i[0], &store.variables()["w"])
        };
        let builder = Rollout::builder(&vs).restore_gradients(restore).serialize_rng(false);
        let rollout = builder.accumulate_in(Kind::Float).build();
        let y = rollout.block("waits", &[("x", &start(w.kind()))], body).unwrap();
        rollout.backward(&y.to_kind(Kind::Float).sum(Kind::Float)).unwrap();
        assert_eq!(w.grad().kind(), Kind::Float);
    }
}
