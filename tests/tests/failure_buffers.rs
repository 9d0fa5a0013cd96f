//! Guarantee *failure*, for buffers: the running statistics of a normalisation layer are what they were before a block
//! that fails, in its forward or in its replay, after it has written them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{Outcome, Setup, assert_same, randn, same_bits};
use tch::nn::{self, ModuleT};
use tch::{Kind, Tensor};

fn setup() -> Setup<nn::BatchNorm> {
    Setup::new(|path| nn::batch_norm1d(path, 6, nn::BatchNormConfig::default()))
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

/// What a body does after it has written the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Well,
    Error,
    Panic,
}

const ENDS: [End; 3] = [End::Well, End::Error, End::Panic];

fn body(norm: &nn::BatchNorm, x: &Tensor, train: bool, end: End) -> Result<Tensor, &'static str> {
    let y = norm.forward_t(x, train);
    match end {
        End::Well => Ok(y),
        End::Error => Err("on purpose"),
        End::Panic => panic!("on purpose"),
    }
}

/// Demands that `run` fails and leaves the statistics as they were.
fn assert_put_back<T>(norm: &nn::BatchNorm, end: End, run: impl FnOnce() -> Result<T, ReplayError>) {
    let before = (norm.running_mean.copy(), norm.running_var.copy());
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(_)) => panic!("{end:?}: went unnoticed"),
        Ok(Err(error)) => {
            let expected = matches!(error, ReplayError::BufferWritten { .. }) == (end == End::Well);
            assert!(expected && end != End::Panic, "{end:?}: {error}");
        }
        Err(_) => assert_eq!(end, End::Panic),
    }
    assert!(same_bits(&before.0, &norm.running_mean) && same_bits(&before.1, &norm.running_var), "{end:?}");
}

/// A block before the one that fails, and one after it, know nothing of it.
#[test]
fn a_failed_forward_puts_statistics_back() {
    let run = |end: Option<End>| {
        let setup = setup();
        let norm = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let eval = |x: &Tensor| rollout.block("eval", &[("x", x)], |_, i| norm.forward_t(&i[0], false)).unwrap();
        let h = eval(&x());
        if let Some(end) = end {
            assert_put_back(norm, end, || {
                rollout.block("train", &[("h", &h)], move |_, i| body(norm, &i[0], true, end))
            });
        }
        let loss = eval(&h).square().sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    for end in ENDS {
        assert_same(&run(None), &run(Some(end)));
    }
}

#[test]
fn a_failed_replay_puts_statistics_back() {
    for end in ENDS {
        let setup = setup();
        let norm = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("trains", &[("x", &x())], |_, i| {
            let again = is_replaying();
            body(norm, &i[0], again, if again { end } else { End::Well })
        });
        let loss = y.unwrap().sum(Kind::Float);
        assert_put_back(norm, end, || rollout.backward(&loss));
        assert!(setup.grads().values().all(Option::is_none));
    }
}

/// An inner block fails, or the outer one after it.
#[test]
fn a_failed_inner_block_puts_statistics_back() {
    for (inner, outer) in [(End::Error, End::Well), (End::Panic, End::Well), (End::Well, End::Error)] {
        let setup = setup();
        let norm = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let before = norm.running_mean.copy();
        let run = || {
            rollout.block("outer", &[("x", &x())], |rollout, i| {
                let y = rollout.block("inner", &[("x", &i[0])], move |_, i| body(norm, &i[0], true, inner));
                if outer == End::Well { y.map_err(|error| error.to_string()) } else { Err("on purpose".to_owned()) }
            })
        };
        assert!(!matches!(catch_unwind(AssertUnwindSafe(run)), Ok(Ok(_))));
        assert!(same_bits(&before, &norm.running_mean), "{inner:?} {outer:?}");
    }
}
