//! Guarantee *failure*, for what surrounds a body: contexts that err or panic when they are entered or left, storage
//! that cannot be had, and panics of all kinds, each told to the panic hook once. Afterwards everything is as before.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicUsize, Ordering};

use replay_runtime::{BoxError, Pass, ReplayContext, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::{Outcome, Setup, assert_same, randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

/// Where a context fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    EnterError,
    EnterPanic,
    ExitPanic,
}

/// A model of whose steps one may be surrounded by a context that fails.
struct World {
    w: Tensor,
    fails: Cell<Option<(At, Pass, i64)>>,
    depth: Cell<i64>,
}

struct Surround<'m>(&'m World, i64);

/// Open while it lives.
struct Open<'s>(&'s World, bool);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.depth.set(self.0.depth.get() - 1);
        assert!(!self.1, "on the way out");
    }
}

impl Surround<'_> {
    fn open(&self, pass: Pass) -> Result<Open<'_>, BoxError> {
        let fault = self.0.fails.get().filter(|(_, at, step)| *at == pass && *step == self.1).map(|(at, ..)| at);
        // What a context draws is no different from what a body draws.
        let _ = Tensor::rand([3], (Kind::Float, Device::Cpu));
        match fault {
            Some(At::EnterError) => return Err("no way in".into()),
            Some(At::EnterPanic) => panic!("on the way in"),
            _ => {}
        }
        self.0.depth.set(self.0.depth.get() + 1);
        Ok(Open(self.0, fault == Some(At::ExitPanic)))
    }
}

impl ReplayContext for Surround<'_> {
    type Scope<'s>
        = Open<'s>
    where
        Self: 's;

    fn forward(&self) -> Result<Open<'_>, BoxError> {
        self.open(Pass::Forward)
    }

    fn replay(&self) -> Result<Open<'_>, BoxError> {
        self.open(Pass::Replay)
    }
}

thread_local!(static STEP: Cell<i64> = const { Cell::new(0) });

impl World {
    fn new(path: &nn::Path<'_>) -> Self {
        let w = path.var("w", &[4], nn::Init::Const(0.5));
        Self { w, fails: Cell::new(None), depth: Cell::new(0) }
    }

    fn surround(&self) -> Surround<'_> {
        Surround(self, STEP.get())
    }

    #[replay_block(context = Self::surround)]
    fn step(&self, x: &Tensor) -> Tensor {
        (x * &self.w).tanh().dropout(0.2, true)
    }

    #[replay_block]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor, #[meta] step: i64) -> Result<Tensor, ReplayError> {
        STEP.set(step);
        self.step_replay(rollout, &x.sin())
    }
}

const STEPS: i64 = 3;

fn chain<'m>(rollout: &Rollout<'m>, world: &'m World, nested: bool) -> Result<Tensor, ReplayError> {
    let mut h = randn(1, &[4], Kind::Float);
    for step in 0..STEPS {
        STEP.set(step);
        h = if nested { world.outer_replay(rollout, &h, step)? } else { world.step_replay(rollout, &h)? };
    }
    Ok(h.square().sum(Kind::Float))
}

fn run(setup: &Setup<World>, nested: bool) -> Result<Outcome, ReplayError> {
    let rollout = Rollout::new(&setup.vs);
    let loss = chain(&rollout, &setup.model, nested)?;
    rollout.backward(&loss)?;
    Ok(Outcome { loss: loss.detach(), grads: setup.grads() })
}

/// Demands of a failed run that it failed as `at` says.
fn assert_failed(at: At, outcome: std::thread::Result<Result<Outcome, ReplayError>>) {
    match outcome {
        Ok(outcome) => {
            let error = outcome.unwrap_err();
            assert!(at == At::EnterError && error.to_string().contains("no way in"), "{at:?}: {error}");
        }
        Err(payload) => {
            let text = if at == At::EnterPanic { "on the way in" } else { "on the way out" };
            assert_eq!(payload.downcast_ref::<&str>(), Some(&text), "{at:?}");
        }
    }
}

#[test]
fn a_failing_context_restores_everything() {
    for at in [At::EnterError, At::EnterPanic, At::ExitPanic] {
        for (pass, step, nested) in cases() {
            let setup = Setup::new(World::new);
            let world = &setup.model;
            (&world.w * 3.0).sum(Kind::Float).backward();
            let before = (world.w.grad(), world.w.grad().copy());
            world.fails.set(Some((at, pass, step)));
            let outcome = catch_unwind(AssertUnwindSafe(|| run(&setup, nested)));
            assert_failed(at, outcome);
            world.fails.set(None);
            assert_eq!(world.depth.get(), 0, "every scope is closed");
            assert!(!is_replaying() && world.w.exp().requires_grad());
            assert!(same_bits(&world.w.grad(), &before.1) && world.w.grad().data_ptr() == before.0.data_ptr());
            assert_next_is_right(&setup, nested);
        }
    }
}

fn cases() -> impl Iterator<Item = (Pass, i64, bool)> {
    let steps = [Pass::Forward, Pass::Replay].into_iter().flat_map(|pass| (0..STEPS).map(move |step| (pass, step)));
    steps.flat_map(|(pass, step)| [false, true].map(|nested| (pass, step, nested)))
}

/// The next rollout gives what it gives without a failure before it.
fn assert_next_is_right(setup: &Setup<World>, nested: bool) {
    let fresh = Setup::new(World::new);
    (&fresh.model.w * 3.0).sum(Kind::Float).backward();
    assert_same(&run(&fresh, nested).unwrap(), &run(setup, nested).unwrap());
}

/// More storage than there is: LibTorch's allocator says so, and tch panics with what it says.
#[test]
fn storage_that_cannot_be_had() {
    const TOO_LARGE: i64 = 1 << 58;
    for in_replay in [false, true] {
        for by_panic in [false, true] {
            let setup = Setup::new(World::new);
            let w = &setup.model.w;
            let rollout = Rollout::new(&setup.vs);
            let y = catch_unwind(AssertUnwindSafe(|| {
                let y = rollout.block("large", &[("x", &randn(1, &[4], Kind::Float))], |_, i| {
                    if is_replaying() == in_replay {
                        let options = (Kind::Float, Device::Cpu);
                        let zeros = Tensor::f_zeros([TOO_LARGE], options);
                        return (if by_panic { Ok(zeros.unwrap()) } else { zeros }).map(|zeros| zeros * w);
                    }
                    Ok(&i[0] * w)
                })?;
                rollout.backward(&y.sum(Kind::Float))
            }));
            let text = match y {
                Ok(outcome) => outcome.unwrap_err().to_string(),
                Err(payload) => payload.downcast_ref::<String>().expect("tch's text").clone(),
            };
            assert!(text.contains("memory") || text.contains("allocate"), "{text}");
            assert!(!w.grad().defined() && w.exp().requires_grad() && !is_replaying());
            run(&setup, false).unwrap();
        }
    }
}

static TOLD: AtomicUsize = AtomicUsize::new(0);

/// How often the panic hook is called in `act`.
fn told(act: impl FnOnce()) -> usize {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {
        TOLD.fetch_add(1, Ordering::Relaxed);
    }));
    TOLD.store(0, Ordering::Relaxed);
    let outcome = catch_unwind(AssertUnwindSafe(act));
    std::panic::set_hook(hook);
    outcome.expect("what is expected in it");
    TOLD.load(Ordering::Relaxed)
}

/// A panic is resumed on its way, not started again, through however many blocks it goes.
#[test]
fn a_panic_is_told_to_the_hook_once() {
    fn nest<'m>(rollout: &Rollout<'m>, w: &'m Tensor, x: &Tensor, depth: usize, in_replay: bool) -> Tensor {
        rollout
            .block("nest", &[("x", x)], move |rollout, i| {
                if depth == 0 && is_replaying() == in_replay {
                    panic_any(7i32);
                }
                if depth == 0 { &i[0] * w } else { nest(rollout, w, &i[0], depth - 1, in_replay) }
            })
            .unwrap()
    }
    for depth in [0, 3, 50] {
        for in_replay in [false, true] {
            let setup = Setup::new(World::new);
            let told = told(|| {
                let unwound = catch_unwind(AssertUnwindSafe(|| {
                    let rollout = Rollout::new(&setup.vs);
                    let y = nest(&rollout, &setup.model.w, &randn(1, &[4], Kind::Float), depth, in_replay);
                    rollout.backward(&y.sum(Kind::Float))
                }));
                assert_eq!(unwound.unwrap_err().downcast_ref::<i32>(), Some(&7));
            });
            assert_eq!(told, 1, "at depth {depth}, in the replay: {in_replay}");
        }
    }
}

/// Errors, refusals and successes are no panics.
#[test]
fn nothing_else_is_told_to_the_hook() {
    let setup = Setup::new(World::new);
    let w = &setup.model.w;
    let x = randn(1, &[4], Kind::Float);
    let told = told(|| {
        run(&setup, true).unwrap();
        setup.model.fails.set(Some((At::EnterError, Pass::Replay, 1)));
        run(&setup, false).unwrap_err();
        let rollout = Rollout::new(&setup.vs);
        rollout.block("errs", &[("x", &x)], |_, _| -> Result<Tensor, &str> { Err("no") }).unwrap_err();
        let y = rollout.block("fine", &[("x", &x)], |_, i| &i[0] * w).unwrap();
        y.sum(Kind::Float).f_backward().unwrap_err();
        let y =
            rollout.block("errs again", &[("x", &x)], |_, i| if is_replaying() { Err("no") } else { Ok(&i[0] * w) });
        rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    });
    assert_eq!(told, 0);
}

/// A payload of any type comes out as itself.
#[test]
fn payloads_of_every_type() {
    fn thrown<T: Clone + Send + PartialEq + std::fmt::Debug + 'static>(payload: &T) {
        for in_replay in [false, true] {
            let setup = Setup::new(World::new);
            let w = &setup.model.w;
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                let rollout = Rollout::new(&setup.vs);
                let y = rollout.block("throws", &[("x", &randn(1, &[4], Kind::Float))], |_, i| {
                    if is_replaying() == in_replay {
                        panic_any(payload.clone());
                    }
                    &i[0] * w
                });
                rollout.backward(&y.unwrap().sum(Kind::Float))
            }));
            assert_eq!(unwound.unwrap_err().downcast_ref::<T>(), Some(payload));
            assert!(!w.grad().defined());
        }
    }
    thrown(&"text");
    thrown(&String::from("a text of its own"));
    thrown(&vec![1u8, 2]);
    thrown(&());
    thrown(&Some(Box::new(3.5f64)));
}
