//! Guarantee *contexts*, for the state that models keep beside their tensors: caches, modes, switches and counters that
//! change from step to step. A context puts them back for the replay; without one the replay is refused where its
//! outputs tell, and what a block logs it can log once.

use std::cell::{Cell, RefCell};

use replay_runtime::{AutocastGuard, BoxError, ReplayContext, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::{Outcome, Setup, assert_same, bytes, randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

/// A decoder that appends to a cache, counts its steps, and takes another kernel when it is told to.
struct Decoder {
    w: Tensor,
    gate: Tensor,
    cache: RefCell<Vec<Tensor>>,
    kernel: Cell<Kernel>,
    scale: Cell<f64>,
    log: RefCell<Vec<f64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Plain,
    /// Computes in double precision.
    Exact,
}

/// All of a decoder's state, put back for a replay and set again to what it was before it.
struct Snapshot<'m> {
    decoder: &'m Decoder,
    cache: Vec<Tensor>,
    kernel: Kernel,
    scale: f64,
}

struct Restored<'s>(&'s Decoder, Vec<Tensor>, Kernel, f64);

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        self.0.cache.replace(std::mem::take(&mut self.1));
        self.0.kernel.set(self.2);
        self.0.scale.set(self.3);
    }
}

fn clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

impl ReplayContext for Snapshot<'_> {
    type Scope<'s>
        = Option<Restored<'s>>
    where
        Self: 's;

    fn forward(&self) -> Result<Self::Scope<'_>, BoxError> {
        Ok(None)
    }

    fn replay(&self) -> Result<Self::Scope<'_>, BoxError> {
        let decoder = self.decoder;
        let cache = decoder.cache.replace(clones(&self.cache));
        Ok(Some(Restored(decoder, cache, decoder.kernel.replace(self.kernel), decoder.scale.replace(self.scale))))
    }
}

impl Decoder {
    fn new(path: &nn::Path<'_>) -> Self {
        let (w, gate) = (path.var("w", &[4], nn::Init::Const(0.5)), path.var("gate", &[4], nn::Init::Const(0.25)));
        let state = (RefCell::default(), Cell::new(Kernel::Plain), Cell::new(1.0), RefCell::default());
        Self { w, gate, cache: state.0, kernel: state.1, scale: state.2, log: state.3 }
    }

    fn snapshot(&self) -> Snapshot<'_> {
        let cache = clones(&self.cache.borrow());
        Snapshot { decoder: self, cache, kernel: self.kernel.get(), scale: self.scale.get() }
    }

    fn attend(&self, x: &Tensor) -> Tensor {
        let key = (x * &self.w).tanh();
        self.cache.borrow_mut().push(key.detach());
        let history = Tensor::stack(&self.cache.borrow(), 0).sum_dim_intlist(0i64, false, Kind::Float);
        let kind = if self.kernel.get() == Kernel::Exact { Kind::Double } else { Kind::Float };
        let y = (key * history * self.scale.get()).to_kind(kind);
        if !is_replaying() {
            self.log.borrow_mut().push(y.abs().mean(Kind::Double).double_value(&[]));
        }
        y
    }

    #[replay_block(context = Self::snapshot)]
    fn step(&self, x: &Tensor) -> Tensor {
        self.attend(x)
    }

    #[replay_block]
    fn bare(&self, x: &Tensor) -> Tensor {
        self.attend(x)
    }

    /// The whole cache is an output, so that its length is seen.
    #[replay_block]
    fn bare_cache(&self, x: &Tensor) -> (Tensor, Tensor) {
        let y = self.attend(x);
        (y, Tensor::stack(&self.cache.borrow(), 0))
    }

    /// The mode by value.
    #[replay_block]
    fn told(&self, x: &Tensor, #[meta] train: bool) -> Tensor {
        let h = x * &self.w;
        if train { h.sin() * &self.gate } else { h.cos() }
    }
}

fn x(seed: i64) -> Tensor {
    randn(seed, &[4], Kind::Float)
}

/// Five steps, whose switches change between them; what is seen of the decoder after the backward pass.
fn decode(replay: bool) -> (Outcome, Vec<f64>, Vec<Vec<u8>>) {
    let setup = Setup::new(Decoder::new);
    let decoder = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let mut h = x(1);
    for step in 0..5 {
        decoder.kernel.set(if step % 2 == 0 { Kernel::Plain } else { Kernel::Exact });
        decoder.scale.set(f64::from(step) + 0.5);
        let y = if replay { decoder.step_replay(&rollout, &h).unwrap() } else { decoder.step(&h) };
        h = y.to_kind(Kind::Float);
    }
    decoder.kernel.set(Kernel::Exact);
    decoder.scale.set(99.0);
    let loss = h.sum(Kind::Float);
    if replay {
        rollout.backward(&loss).unwrap();
    } else {
        loss.backward();
    }
    assert!(decoder.kernel.get() == Kernel::Exact && decoder.scale.get() > 98.0, "the caller's state");
    let outcome = Outcome { loss: loss.detach(), grads: setup.grads() };
    (outcome, decoder.log.take(), decoder.cache.take().iter().map(bytes).collect())
}

/// One use of the weight per step: plain autograd's bits. The cache grows once, and the log too.
#[test]
fn a_cache_that_grows_is_put_back_for_the_replay() {
    let (plain, replayed) = (decode(false), decode(true));
    assert_same(&plain.0, &replayed.0);
    assert_eq!((&plain.1, plain.1.len()), (&replayed.1, 5));
    assert_eq!((&plain.2, plain.2.len()), (&replayed.2, 5));
}

/// Without a context, a grown cache shows in the outputs' shape.
#[test]
fn a_cache_that_grows_unseen_is_an_error() {
    let setup = Setup::new(Decoder::new);
    let rollout = Rollout::new(&setup.vs);
    let (y, cache) = setup.model.bare_cache_replay(&rollout, &x(1)).unwrap();
    assert_eq!(cache.size(), [1, 4]);
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::OutputMismatch { block, .. } if block.contains("bare_cache")), "{error}");
    assert!(error.to_string().contains("[1, 4]") && error.to_string().contains("[2, 4]"), "{error}");
    assert!(!setup.model.w.grad().defined());
}

/// Another kernel in the replay is an error that names the block; with a context the replay takes the forward's.
#[test]
fn another_kernel_in_the_replay_is_named() {
    let run = |with_context: bool| {
        let setup = Setup::new(Decoder::new);
        let decoder = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let y = if with_context {
            decoder.step_replay(&rollout, &x(1)).unwrap()
        } else {
            decoder.bare_replay(&rollout, &x(1)).unwrap()
        };
        decoder.kernel.set(Kernel::Exact);
        rollout.backward(&y.sum(Kind::Float)).map(drop)
    };
    run(true).unwrap();
    let error = run(false).unwrap_err();
    assert!(matches!(&error, ReplayError::OutputMismatch { block, .. } if block.contains("bare")), "{error}");
    assert!(error.to_string().contains("Float") && error.to_string().contains("Double"), "{error}");
}

/// Two forwards are alive at once, and each replay has the state of its own: both losses in one pass, and the first
/// alone.
#[test]
fn two_forwards_alive_each_have_their_own_state() {
    let run = |replay: bool, both: bool| {
        let setup = Setup::new(Decoder::new);
        let decoder = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let call = |x: &Tensor| if replay { decoder.step_replay(&rollout, x).unwrap() } else { decoder.step(x) };
        decoder.scale.set(2.0);
        let first = call(&x(1));
        decoder.scale.set(3.0);
        let second = call(&x(2));
        let loss = if both { first + second } else { first }.sum(Kind::Float);
        if replay {
            drop(rollout.backward(&loss).unwrap());
        } else {
            loss.backward();
        }
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    for both in [false, true] {
        assert_same(&run(false, both), &run(true, both));
    }
}

/// A mode that is passed as data is the forward's, whatever the caller does with his own by then; and it is gradient
/// mode that says whether a block is recorded, not the model's.
#[test]
fn train_and_eval_are_those_of_the_forward() {
    let run = |replay: bool| {
        let setup = Setup::new(Decoder::new);
        let decoder = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let mut train = true;
        let mut call = |x: &Tensor| {
            let y = if replay { decoder.told_replay(&rollout, x, train).unwrap() } else { decoder.told(x, train) };
            train = !train;
            y
        };
        let h = call(&x(1));
        let h = call(&h);
        let aside = tch::no_grad(|| call(&h));
        assert!(h.requires_grad() && !aside.requires_grad());
        let loss = (h * aside).sum(Kind::Float);
        if replay {
            let report = rollout.backward(&loss).unwrap();
            assert_eq!(report.total.replays, 2, "eval mode is no reason to keep nothing, and train mode none to keep");
        } else {
            loss.backward();
        }
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

/// Looks at autocast and at the decoder's scale.
struct Looks<'d>(&'d Decoder, RefCell<Vec<(Kind, f64)>>);

impl<'d> Looks<'d> {
    fn snapshot(&self) -> Snapshot<'d> {
        self.0.snapshot()
    }

    #[replay_block(context = Self::snapshot)]
    fn look(&self, x: &Tensor) -> Tensor {
        let column = (x * &self.0.w).unsqueeze(1);
        let product = column.matmul(&column.tr());
        self.1.borrow_mut().push((product.kind(), self.0.scale.get()));
        product.to_kind(Kind::Float)
    }
}

/// Autocast and a mode of the user's own are both back in the replay, and both as the caller left them after it.
#[test]
fn autocast_and_a_mode_of_the_users_own() {
    let setup = Setup::new(Decoder::new);
    let looks = Looks(&setup.model, RefCell::default());
    let rollout = Rollout::new(&setup.vs);
    let mut loss = Tensor::from(0f32);
    for (scale, kind) in [(4.0, Kind::BFloat16), (5.0, Kind::Half)] {
        looks.0.scale.set(scale);
        let _autocast = AutocastGuard::new(Device::Cpu, kind);
        loss += looks.look_replay(&rollout, &x(1)).unwrap().sum(Kind::Float);
    }
    looks.0.scale.set(1.0);
    rollout.backward(&loss).unwrap();
    let (first, second) = ((Kind::BFloat16, 4.0), (Kind::Half, 5.0));
    assert_eq!(looks.1.take(), [first, second, second, first]);
    assert!(looks.0.scale.get() < 1.5);
}

/// An adapter that is switched between two forwards: by the model's field in a context, and by `requires_grad`, which
/// is an error.
#[test]
fn an_adapter_switched_between_forwards() {
    let setup = Setup::new(Decoder::new);
    let decoder = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let first = decoder.told_replay(&rollout, &x(1), true).unwrap();
    let _ = decoder.gate.set_requires_grad(false);
    let second = decoder.told_replay(&rollout, &x(1), true).unwrap();
    assert!(same_bits(&first, &second));
    let error = rollout.backward(&(first + second).sum(Kind::Float)).unwrap_err();
    let named = |variable: &str, what: &str| variable == "gate" && what == "requires_grad";
    assert!(matches!(&error, ReplayError::VariableChanged { variable, what, .. } if named(variable, what)), "{error}");
    assert!(!decoder.w.grad().defined() && !decoder.gate.grad().defined());
}
