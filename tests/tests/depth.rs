//! Guarantee *depth*: a thousand blocks side by side or one behind the other, and a hundred inside each other, run and
//! are dropped on a small stack.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};

use replay_runtime::{AutocastGuard, ReplayError, Rollout};
use replay_tests::{How, Oracle, Setup, assert_exact, randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

/// Runs `test` on a stack of two MiB, whatever the test harness gives.
fn on_a_small_stack(test: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(2 << 20).spawn(test).expect("a thread").join().expect("the test passes");
}

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[4], nn::Init::Const(0.9)))
}

fn siblings<'m>(how: &How<'_, 'm>, w: &'m Tensor, _: &[(String, Tensor)]) -> Tensor {
    let losses: Vec<_> = (0..1000)
        .map(|i| {
            let x = Tensor::from(f64::from(i) / 1000.0).to_kind(Kind::Float);
            how.block("sibling", &[("x", &x)], move |i| (&i[0] * w).sin())
        })
        .collect();
    Tensor::stack(&losses, 0).sum(Kind::Float)
}

fn chain<'m>(how: &How<'_, 'm>, w: &'m Tensor, length: usize) -> Tensor {
    let mut h = Tensor::from(1f32);
    for _ in 0..length {
        h = how.block("link", &[("h", &h)], move |i| (&i[0] * w).tanh() + 0.1);
    }
    h.sum(Kind::Float)
}

/// Each weight is used once per block: plain autograd's bits.
#[test]
fn a_thousand_siblings() {
    on_a_small_stack(|| assert_exact(Oracle::Plain, setup, siblings));
}

#[test]
fn a_thousand_siblings_dropped() {
    on_a_small_stack(|| dropped(|how, w| siblings(how, w, &[])));
}

/// As above.
#[test]
fn a_chain_of_a_thousand() {
    on_a_small_stack(|| assert_exact(Oracle::Plain, setup, |how, w, _| chain(how, w, 1000)));
}

#[test]
fn a_chain_of_a_thousand_dropped() {
    on_a_small_stack(|| dropped(|how, w| chain(how, w, 1000)));
}

#[test]
fn a_chain_of_twenty_thousand_dropped() {
    on_a_small_stack(|| dropped(|how, w| chain(how, w, 20_000)));
}

/// Drops a forward without a backward pass, the rollout first and the loss first.
fn dropped(program: impl for<'m> Fn(&How<'_, 'm>, &'m Tensor) -> Tensor) {
    let setup = setup();
    for loss_first in [false, true] {
        let rollout = Rollout::new(&setup.vs);
        let loss = program(&How::Replay(&rollout), &setup.model);
        if loss_first {
            drop(loss);
            drop(rollout);
        } else {
            drop(rollout);
            drop(loss);
        }
    }
}

/// A block that contains a block, and so on; the innermost one computes.
fn nest<'m>(rollout: &Rollout<'m>, w: &'m Tensor, x: &Tensor, depth: usize) -> Result<Tensor, ReplayError> {
    rollout.block("nest", &[("x", x)], move |rollout, i| match depth {
        1 => Ok((&i[0] * w).tanh()),
        _ => nest(rollout, w, &i[0], depth - 1),
    })
}

/// One use of everything: plain autograd's bits.
#[test]
fn a_hundred_inside_each_other() {
    on_a_small_stack(|| {
        assert_exact(Oracle::Plain, setup, |how, w, _| {
            let x = Tensor::from(0.5f32);
            let y = match how {
                How::Replay(rollout) | How::EarlyStop(rollout) => nest(rollout, w, &x, 100).unwrap(),
                _ => (x * w).tanh(),
            };
            y.sum(Kind::Float)
        });
    });
}

/// Two of them in a row, each used once by the loss; what was learnt on the first must not hinder the second.
#[test]
fn twice_a_hundred() {
    on_a_small_stack(|| {
        assert_exact(Oracle::Plain, setup, |how, w, _| {
            let mut h = Tensor::from(0.5f32);
            for _ in 0..2 {
                h = match how {
                    How::Replay(rollout) | How::EarlyStop(rollout) => nest(rollout, w, &h, 100).unwrap(),
                    _ => (h * w).tanh(),
                };
            }
            h.sum(Kind::Float)
        });
    });
}

#[test]
fn a_hundred_inside_each_other_dropped() {
    on_a_small_stack(|| {
        dropped(|how, w| match how {
            How::Replay(rollout) | How::EarlyStop(rollout) => {
                nest(rollout, w, &Tensor::from(0.5f32), 100).unwrap().sum(Kind::Float)
            }
            _ => unreachable!("only replayed programs are dropped"),
        });
    });
}

/// The innermost of a hundred runs once in the forward, once in the replay of each block around it, and then in its own.
const OWN_REPLAY: u32 = 101;

/// `nest`, whose innermost block calls `fail` in its own replay.
fn fail_deep<'m>(
    rollout: &Rollout<'m>,
    (w, runs): (&'m Tensor, &'m Cell<u32>),
    x: &Tensor,
    depth: usize,
    fail: fn() -> Result<Tensor, &'static str>,
) -> Result<Tensor, ReplayError> {
    if depth > 1 {
        return rollout
            .block("nest", &[("x", x)], move |rollout, i| fail_deep(rollout, (w, runs), &i[0], depth - 1, fail));
    }
    rollout.block("innermost", &[("x", x)], move |_, i| {
        runs.set(runs.get() + 1);
        if runs.get() == OWN_REPLAY { fail() } else { Ok(&i[0] * w) }
    })
}

/// From the thread that the innermost replay runs on, an error finds its way out through all hundred.
#[test]
fn an_error_a_hundred_deep_comes_out() {
    on_a_small_stack(|| {
        let (setup, runs) = (setup(), Cell::new(0));
        let rollout = Rollout::new(&setup.vs);
        let x = Tensor::from(0.5f32);
        let loss = fail_deep(&rollout, (&setup.model, &runs), &x, 100, || Err("no")).unwrap().sum(Kind::Float);
        let error = rollout.backward(&loss).unwrap_err();
        assert!(matches!(&error, ReplayError::Block { block, .. } if block == "innermost"), "{error}");
        assert_eq!(runs.get(), OWN_REPLAY);
        assert!(!setup.model.grad().defined());
    });
}

/// So does a panic.
#[test]
fn a_panic_a_hundred_deep_comes_out() {
    on_a_small_stack(|| {
        let (setup, runs) = (setup(), Cell::new(0));
        let rollout = Rollout::new(&setup.vs);
        let x = Tensor::from(0.5f32);
        let loss = fail_deep(&rollout, (&setup.model, &runs), &x, 100, || panic_any("deep")).unwrap().sum(Kind::Float);
        let panic = catch_unwind(AssertUnwindSafe(|| rollout.backward(&loss))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"deep"));
        assert_eq!(runs.get(), OWN_REPLAY);
        assert!(!setup.model.grad().defined());
    });
}

/// Where the engine has moved to another thread, blocks are differentiated under the modes of the caller of `backward` all
/// the same, as plain autograd does it.
#[test]
fn the_callers_modes_reach_a_hundred_deep() {
    fn product<'m>(rollout: &Rollout<'m>, w: &'m Tensor, x: &Tensor, depth: usize) -> Result<Tensor, ReplayError> {
        rollout.block("nest", &[("x", x)], move |rollout, i| match depth {
            1 => Ok(i[0].matmul(w)),
            _ => product(rollout, w, &i[0], depth - 1),
        })
    }
    let gradient = |depth: usize, autocast: bool| {
        let setup = Setup::new(|path| path.randn_standard("w", &[8, 8]));
        let (w, x) = (&setup.model, randn(1, &[8, 8], Kind::Float));
        let rollout = Rollout::new(&setup.vs);
        let y = if depth == 0 { x.matmul(w) } else { product(&rollout, w, &x, depth).unwrap() };
        let loss = y.sum(Kind::Float);
        let _autocast = autocast.then(|| AutocastGuard::new(Device::Cpu, Kind::BFloat16));
        if depth == 0 {
            loss.backward();
        } else {
            rollout.backward(&loss).unwrap();
        }
        w.grad()
    };
    on_a_small_stack(move || {
        let expected = gradient(0, true);
        assert!(!same_bits(&expected, &gradient(0, false)), "autocast does something");
        for depth in [1, 100] {
            assert!(same_bits(&expected, &gradient(depth, true)), "{depth}");
        }
    });
}
