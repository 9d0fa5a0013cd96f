//! Guarantee *captures*: what leaves a body by the way, and what bodies that failed have captured.

use std::cell::RefCell;

use replay_runtime::{BoxError, ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, bytes, randn};
use tch::{Device, Kind, Tensor, nn};

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.randn_standard("w", &[6]))
}

fn leaf(seed: i64) -> Tensor {
    randn(seed, &[6], Kind::Float).set_requires_grad(true)
}

/// Whichever of the inputs it was computed from: the error names that one.
#[test]
fn every_input_may_leave_the_body_by_the_way() {
    for (which, name) in ["first", "second", "third"].into_iter().enumerate() {
        let setup = setup();
        let (leaves, aside) = ([leaf(1), leaf(2), leaf(3)], RefCell::new(None));
        let inputs = [("first", &leaves[0]), ("second", &leaves[1]), ("third", &leaves[2])];
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("leaks", &inputs, |_, i| {
            aside.replace(Some(i[which].sin().sum(Kind::Float)));
            &i[0] * &i[1] * &i[2] * &setup.model
        });
        let loss = y.unwrap().sum(Kind::Float) + aside.take().unwrap();
        let error = rollout.backward(&loss).unwrap_err();
        assert!(
            matches!(&error, ReplayError::Escaped { block, input } if block == "leaks" && input == name),
            "{error}"
        );
        assert!(!setup.model.grad().defined());
    }
}

/// A tensor with its history that is logged and thrown away was no part of the loss.
#[test]
fn what_left_the_body_and_is_gone_is_no_matter() {
    let setup = setup();
    let (x, aside) = (leaf(1), RefCell::new(None));
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("logs", &[("x", &x)], |_, i| {
        let y = &i[0] * &setup.model;
        aside.replace(Some(y.shallow_clone()));
        y
    });
    drop(aside.take());
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(bytes(&setup.model.grad()), bytes(&x.detach()));
    assert_eq!(bytes(&x.grad()), bytes(&setup.model.detach()));
}

/// A body that gets by without an inner block that failed does not depend on what that one captured.
#[test]
fn what_a_failed_inner_block_captured_is_not_watched() {
    let setup = setup();
    let (model, captured) = (&setup.model, leaf(3));
    let (held, x) = (captured.shallow_clone(), randn(1, &[6], Kind::Float));
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("outer", &[("x", &x)], move |rollout, i| {
        let held = held.shallow_clone();
        let failed = rollout.block("fails", &[("x", &i[0])], move |rollout, i| {
            let held = held.shallow_clone();
            let _ = rollout.block("captures", &[("x", &i[0])], move |_, i| &i[0] * &held)?;
            Err::<Tensor, BoxError>("as asked".into())
        });
        assert!(failed.is_err());
        &i[0] * model
    });
    let y = y.unwrap();
    tch::no_grad(|| drop(captured.shallow_clone().g_add_scalar_(1.0)));
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(bytes(&model.grad()), bytes(&x));
    assert!(!captured.grad().defined());
}

/// A variable that was not made to be trained and requires grad by the user's own doing gets its gradient like others, and
/// gets its old one back.
#[test]
fn a_constant_that_the_user_made_require_grad() {
    let run = |replay: bool, fail: bool| {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().ones_no_train("w", &[6]).set_requires_grad(true);
        (&w * 3.0).sum(Kind::Float).backward();
        let x = randn(1, &[6], Kind::Float);
        let step = |i: &Tensor| i * &w;
        let rollout = Rollout::new(&vs);
        let h =
            if replay {
                rollout.block("first", &[("x", &x)], |_, i| {
                    if fail && is_replaying() { Err("as asked") } else { Ok(step(&i[0])) }
                })
            } else {
                Ok(step(&x))
            };
        let h = h.unwrap();
        let y = if replay { rollout.block("last", &[("h", &h)], |_, i| step(&i[0])).unwrap() } else { step(&h) };
        let loss = y.sum(Kind::Float);
        if replay {
            assert_eq!(rollout.backward(&loss).is_err(), fail);
        } else {
            loss.backward();
        }
        w.grad()
    };
    assert_eq!(bytes(&run(true, false)), bytes(&run(false, false)));
    assert_eq!(bytes(&run(true, true)), bytes(&Tensor::full([6], 3.0, (Kind::Float, Device::Cpu))));
}

/// A block inside that reads the outer block's input without having it as an input: it gets there by two ways. Whole numbers,
/// whose sums have the same bits in any order.
#[test]
fn an_input_that_an_inner_block_captures_gets_both_gradients() {
    let run = |replay: bool| {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().var_copy("w", &Tensor::from_slice(&[1f32, 2.0, 3.0]));
        let x = Tensor::from_slice(&[4f32, -5.0, 6.0]).set_requires_grad(true);
        let rollout = Rollout::new(&vs);
        if replay {
            let w = &w;
            let y = rollout.block("outer", &[("x", &x)], move |rollout, i| {
                let captured = i[0].shallow_clone();
                let h = rollout.block("inner", &[("h", &(&i[0] * 2.0))], move |_, i| &i[0] * &captured * w)?;
                Ok::<_, ReplayError>(h * &i[0])
            });
            rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
        } else {
            (&x * 2.0 * &x * &w * &x).sum(Kind::Float).backward();
        }
        (x.grad(), w.grad())
    };
    let (expected, found) = (run(false), run(true));
    assert_eq!((bytes(&expected.0), bytes(&expected.1)), (bytes(&found.0), bytes(&found.1)));
}
