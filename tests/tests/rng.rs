//! Guarantee *RNG*: a replay draws what the forward drew, the caller's stream is untouched by it, and a replay that
//! leaves the generator elsewhere than the forward did is an error.
//!
//! Where gradients are compared with an oracle it is plain autograd: each weight is used once inside each block and
//! nowhere else, and both programs draw in the same order.

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{How, Oracle, Setup, assert_exact, randn, replayed, same_bits};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn draw() -> Tensor {
    Tensor::rand([4], (Kind::Float, Device::Cpu))
}

fn noisy<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, _: &[(String, Tensor)]) -> Tensor {
    let mut h = randn(1, &[5, 6], Kind::Float);
    for _ in 0..5 {
        h = how.block("drop", &[("h", &h)], |i| model.forward(&i[0]).tanh().dropout(0.4, true));
    }
    h.square().sum(Kind::Float)
}

#[test]
fn dropout_is_replayed() {
    assert_exact(Oracle::Plain, || Setup::new(linear), noisy);
}

/// Few normal numbers are drawn in pairs, of which the generator keeps the second one for later.
#[test]
fn halves_of_normal_pairs_are_replayed() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let mut h = randn(1, &[5, 6], Kind::Float);
            for _ in 0..5 {
                h = how.block("jitter", &[("h", &h)], |i| {
                    model.forward(&i[0]).tanh() * Tensor::randn([1], (Kind::Float, Device::Cpu))
                });
            }
            h.square().sum(Kind::Float)
        },
    );
}

#[test]
fn numbers_drawn_between_blocks_do_not_disturb_them() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let mut h = randn(1, &[5, 6], Kind::Float);
            for _ in 0..3 {
                h = how.block("drop", &[("h", &h)], |i| model.forward(&i[0]).dropout(0.4, true));
                h = &h * Tensor::rand([6], (Kind::Float, Device::Cpu));
            }
            tch::manual_seed(99);
            h.square().sum(Kind::Float)
        },
    );
}

#[test]
fn a_block_that_seeds_for_itself_is_replayed() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let x = randn(1, &[5, 6], Kind::Float);
            how.block("seeded", &[("x", &x)], |i| {
                tch::manual_seed(3);
                model.forward(&i[0]).dropout(0.5, true)
            })
            .sum(Kind::Float)
        },
    );
}

/// In the forward the seed is the one the generator has already, so that nothing moves; in the replay it is not.
#[test]
fn a_block_that_seeds_and_draws_nothing() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    tch::manual_seed(3);
    let x = Tensor::ones([5, 6], (Kind::Float, Device::Cpu));
    let y = rollout.block("seeds", &[("x", &x)], |_, i| {
        tch::manual_seed(3);
        setup.model.forward(&i[0])
    });
    tch::manual_seed(4);
    let expected = draw();
    tch::manual_seed(4);
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert!(same_bits(&expected, &draw()));
}

#[test]
fn nested_blocks_replay_their_numbers() {
    let run = |nested: bool| {
        let setup = Setup::new(linear);
        let model = &setup.model;
        let x = randn(1, &[5, 6], Kind::Float);
        let rollout = Rollout::new(&setup.vs);
        let inner = move |i: &[Tensor]| model.forward(&i[0]).tanh().dropout(0.4, true);
        let y = rollout
            .block("outer", &[("x", &x)], move |rollout, i| {
                let h = i[0].dropout(0.2, true);
                let h =
                    if nested { rollout.block("inner", &[("h", &h)], move |_, i| inner(i)) } else { Ok(inner(&[h])) };
                h.map(|h| h * draw().sum(Kind::Float))
            })
            .unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        (model.ws.grad(), draw())
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected.0, &found.0) && same_bits(&expected.1, &found.1));
}

#[test]
fn the_forward_takes_from_the_callers_stream() {
    let setup = Setup::new(linear);
    let x = randn(1, &[5, 6], Kind::Float);
    tch::manual_seed(4);
    let expected = (setup.model.forward(&x).dropout(0.4, true), draw());
    tch::manual_seed(4);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("drop", &[("x", &x)], |_, i| setup.model.forward(&i[0]).dropout(0.4, true)).unwrap();
    assert!(same_bits(&expected.0, &y) && same_bits(&expected.1, &draw()));
}

#[test]
fn the_backward_pass_leaves_the_callers_stream_alone() {
    let setup = Setup::new(linear);
    tch::manual_seed(4);
    let expected = draw();
    let rollout = Rollout::new(&setup.vs);
    let loss = noisy(&How::Replay(&rollout), &setup.model, &[]);
    tch::manual_seed(4);
    rollout.backward(&loss).unwrap();
    assert!(same_bits(&expected, &draw()));
}

/// Also the half of a pair that waits in the generator.
#[test]
fn the_backward_pass_leaves_a_waiting_half_alone() {
    let normal = || Tensor::randn([1], (Kind::Float, Device::Cpu));
    let setup = Setup::new(linear);
    tch::manual_seed(4);
    let expected = [normal(), normal()];
    let rollout = Rollout::new(&setup.vs);
    let loss = noisy(&How::Replay(&rollout), &setup.model, &[]);
    tch::manual_seed(4);
    let first = normal();
    rollout.backward(&loss).unwrap();
    assert!(same_bits(&expected[0], &first) && same_bits(&expected[1], &normal()));
}

/// Wherever the caller's generator stands by then.
#[test]
fn a_block_that_draws_nothing_needs_no_generator() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let x = randn(1, &[5, 6], Kind::Float);
            let y = how.block("quiet", &[("x", &x)], |i| model.forward(&i[0]).tanh());
            tch::manual_seed(1234);
            y.sum(Kind::Float)
        },
    );
    tch::manual_seed(4);
    let expected = draw();
    let setup = Setup::new(linear);
    tch::manual_seed(4);
    replayed(&setup, |how, model, _| {
        let x = Tensor::ones([5, 6], (Kind::Float, Device::Cpu));
        how.block("quiet", &[("x", &x)], |i| model.forward(&i[0])).sum(Kind::Float)
    });
    assert!(same_bits(&expected, &draw()));
}

/// Runs a block that draws `forward` times and `replay` times, and returns what `backward` says.
fn diverge(forward: usize, replay: usize) -> Result<(), ReplayError> {
    let setup = Setup::new(linear);
    let x = randn(1, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("fickle", &[("x", &x)], |_, i| {
        let mut y = setup.model.forward(&i[0]);
        for _ in 0..if is_replaying() { replay } else { forward } {
            y = &y * draw().sum(Kind::Float);
        }
        y
    });
    tch::manual_seed(4);
    let expected = draw();
    tch::manual_seed(4);
    let outcome = rollout.backward(&y.unwrap().sum(Kind::Float));
    assert!(same_bits(&expected, &draw()), "the caller's stream was disturbed");
    assert_eq!(setup.model.ws.grad().defined(), outcome.is_ok());
    outcome.map(drop)
}

#[test]
fn a_replay_that_draws_another_amount_is_an_error() {
    for (forward, replay) in [(2, 1), (1, 2), (0, 1), (1, 0)] {
        let error = diverge(forward, replay).unwrap_err();
        assert!(matches!(&error, ReplayError::RngDiverged { block, .. } if block == "fickle"), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("`fickle`") && text.contains("Cpu") && text.lines().count() == 2, "{text}");
    }
    for draws in [0, 1, 2] {
        diverge(draws, draws).unwrap();
    }
}

#[test]
fn a_replay_that_seeds_otherwise_is_an_error() {
    let setup = Setup::new(linear);
    let x = randn(1, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("reseeds", &[("x", &x)], |_, i| {
        if is_replaying() {
            tch::manual_seed(8);
        }
        setup.model.forward(&i[0]).dropout(0.4, true)
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::RngDiverged { block, .. } if block == "reseeds"), "{error:?}");
}

/// A replay that fails before its draws are compared: its forward drew nothing, so nothing else tells that it did.
#[test]
fn a_failing_replay_that_draws_for_the_first_time_puts_the_generator_back() {
    for panics in [false, true] {
        let setup = Setup::new(linear);
        let x = randn(1, &[5, 6], Kind::Float);
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block("fails", &[("x", &x)], |_, i| {
            if is_replaying() {
                let _ = draw();
                assert!(!panics, "as asked");
                return Err("as asked");
            }
            Ok(setup.model.forward(&i[0]))
        });
        let loss = y.unwrap().sum(Kind::Float);
        tch::manual_seed(4);
        let expected = draw();
        tch::manual_seed(4);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rollout.backward(&loss)));
        assert!(outcome.map_or(panics, |outcome| outcome.is_err()));
        assert!(same_bits(&expected, &draw()));
    }
}

/// That the generator stands where it stood is no proof that nothing was drawn.
#[test]
fn a_body_that_draws_and_seeds_back_is_replayed() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let x = randn(1, &[5, 6], Kind::Float);
            tch::manual_seed(4);
            let h = how.block("seeds back", &[("x", &x)], |i| {
                let h = model.forward(&i[0]).dropout(0.5, true);
                tch::manual_seed(4);
                h
            });
            let _ = draw();
            h.square().sum(Kind::Float)
        },
    );
}
