//! Guarantee *threads*, for locks: none of the library's is held while a body, a context or a destructor of the user's
//! runs, and none of the user's while a block is differentiated.
//!
//! A lock that is held would be waited for for ever; every wait here ends after a time, and then the test fails.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use replay_runtime::{BoxError, ReplayContext, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::{Setup, bytes, randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

const PATIENCE: Duration = Duration::from_secs(30);

/// A model behind a lock that its blocks take.
struct Shared {
    w: Tensor,
    calls: Mutex<u32>,
}

impl Shared {
    fn new(path: &nn::Path<'_>) -> Self {
        Self { w: path.var("w", &[4], nn::Init::Const(0.5)), calls: Mutex::new(0) }
    }

    /// Fails where the lock is taken, and would wait for itself with `lock`.
    fn count(&self) {
        *self.calls.try_lock().expect("nobody holds the lock") += 1;
    }

    fn leaf(&self, x: &Tensor) -> Tensor {
        let mut calls = self.calls.try_lock().expect("nobody holds the lock");
        *calls += 1;
        (x * &self.w).tanh()
    }

    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        self.leaf(x)
    }

    #[replay_block]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        self.count();
        let h = self.step_replay(rollout, x)?;
        self.count();
        self.step_replay(rollout, &h)
    }
}

fn x() -> Tensor {
    randn(1, &[4], Kind::Float)
}

/// Siblings, a chain and blocks in blocks of one model behind one lock. One use per block: plain autograd's bits.
#[test]
fn blocks_that_share_a_lock() {
    let setup = Setup::new(Shared::new);
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let (a, b) = (model.step_replay(&rollout, &x()).unwrap(), model.step_replay(&rollout, &x().sin()).unwrap());
    let c = model.outer_replay(&rollout, &(a * b)).unwrap();
    rollout.backward(&c.sum(Kind::Float)).unwrap();
    // Two siblings twice; the outer block twice with two counts of its own, and its two inner blocks three times.
    assert_eq!(*model.calls.lock().unwrap(), 2 * 2 + 2 * 2 + 2 * 3);

    let plain = Setup::new(Shared::new);
    let step = |x: &Tensor| plain.model.leaf(x);
    step(&step(&(step(&x()) * step(&x().sin())))).sum(Kind::Float).backward();
    assert!(same_bits(&plain.model.w.grad(), &model.w.grad()));
}

/// Trains a model of its own on each request, from the first block to the end of the backward pass.
fn worker(asked: Receiver<()>, done: &Sender<Vec<u8>>) {
    for () in asked {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().var("w", &[4], nn::Init::Const(2.0));
        let rollout = Rollout::new(&vs);
        let input = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let y = rollout.block("other", &[("x", &input)], |_, i| &i[0] * &w).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        done.send(bytes(&w.grad())).unwrap();
    }
}

/// Another thread, how to have it train once meanwhile, and how often it has.
struct Other(Sender<()>, Receiver<Vec<u8>>, Cell<u32>);

impl Other {
    fn start() -> Self {
        let ((ask, asked), (send, receive)) = (channel(), channel());
        thread::spawn(move || worker(asked, &send));
        Self(ask, receive, Cell::new(0))
    }

    fn trains(&self) {
        self.0.send(()).unwrap();
        let grad = self.1.recv_timeout(PATIENCE).expect("the other thread is not held up");
        assert_eq!(grad, bytes(&Tensor::ones([4], (Kind::Float, Device::Cpu))));
        self.2.set(self.2.get() + 1);
    }
}

/// Trains elsewhere when it is dropped, once it is armed.
struct Waits<'m>(&'m Other, &'m Cell<bool>);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if self.1.get() {
            self.0.trains();
        }
    }
}

#[test]
fn another_thread_trains_while_a_body_runs_again() {
    let setup = Setup::new(Shared::new);
    let (model, other) = (&setup.model, Other::start());
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("waits", &[("x", &x())], |_, i| {
        if is_replaying() {
            other.trains();
        }
        model.leaf(&i[0])
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(other.2.get(), 1);
}

/// A block whose closure waits for another thread when it is dropped.
fn waiting<'m>(rollout: &Rollout<'m>, w: &'m Tensor, other: &'m Other, armed: &'m Cell<bool>) -> Tensor {
    let waits = Waits(other, armed);
    rollout
        .block("waits", &[("x", &x())], move |_, i| {
            let _ = &waits;
            &i[0] * w
        })
        .unwrap()
}

/// At the next block, after a replay, and when the rollout ends.
#[test]
fn another_thread_trains_while_a_capture_is_dropped() {
    let setup = Setup::new(Shared::new);
    let (w, other, armed) = (&setup.model.w, Other::start(), Cell::new(true));
    let rollout = Rollout::new(&setup.vs);
    drop(waiting(&rollout, w, &other, &armed));
    let loss = waiting(&rollout, w, &other, &armed).sum(Kind::Float);
    let idle = waiting(&rollout, w, &other, &armed);
    rollout.backward(&loss).unwrap();
    drop(idle);
    let rollout = Rollout::new(&setup.vs);
    let _unused = waiting(&rollout, w, &other, &armed);
    drop(rollout);
    assert_eq!(other.2.get(), 4);
}

/// A model whose context waits for another thread, when the scope of a replay is opened and when it is closed.
struct Slow<'o>(Tensor, &'o Other, Cell<bool>);

struct SlowContext<'s>(&'s Slow<'s>);

impl ReplayContext for SlowContext<'_> {
    type Scope<'s>
        = Option<Waits<'s>>
    where
        Self: 's;

    fn forward(&self) -> Result<Self::Scope<'_>, BoxError> {
        Ok(None)
    }

    fn replay(&self) -> Result<Self::Scope<'_>, BoxError> {
        self.0.1.trains();
        Ok(Some(Waits(self.0.1, &self.0.2)))
    }
}

impl<'o> Slow<'o> {
    fn context(&'o self) -> SlowContext<'o> {
        SlowContext(self)
    }

    #[replay_block(context = Self::context)]
    fn slow(&'o self, x: &Tensor) -> Tensor {
        x * &self.0
    }
}

#[test]
fn another_thread_trains_while_a_context_is_entered_and_left() {
    let other = Other::start();
    let setup = Setup::new(|path| Slow(path.var("w", &[4], nn::Init::Const(0.5)), &other, Cell::new(true)));
    let rollout = Rollout::new(&setup.vs);
    let y = setup.model.slow_replay(&rollout, &x()).unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert!(setup.model.0.grad().equal(&x()));
    assert_eq!(other.2.get(), 2);
}

/// The lock of a gradient is held while it is moved, and not while a body runs: a body may read it.
#[test]
fn a_body_reads_gradients_and_takes_its_own() {
    let setup = Setup::new(Shared::new);
    let w = &setup.model.w;
    (w * 3.0).sum(Kind::Float).backward();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&seen);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("reads", &[("x", &x())], move |_, i| {
        own.lock().unwrap().push(w.grad().defined());
        let own = Tensor::from(2f32).set_requires_grad(true);
        own.square().backward();
        &i[0] * w * own.grad()
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(*seen.lock().unwrap(), [true, false], "old gradients are aside during the backward pass");
}
