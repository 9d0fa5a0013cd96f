//! Early stop: replays that end as soon as the graph of their forward is full again. Every program must give the gradients of
//! plain autograd to the last bit, however it meets the end.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use replay_runtime::{
    BlockOptions, BoxError, Check, EarlyStop, ReplayContext, ReplayError, ReplayOutput, Rollout, RolloutReport,
    is_replaying, replay_block,
};
use replay_tests::{Setup, bytes, randn};
use tch::{Device, Kind, Tensor, nn};

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 }))
}

/// Runs `body` in two blocks in a row, and demands the gradient of plain calls of it.
fn train<R: ReplayOutput<Value = Tensor>>(
    early_stop: EarlyStop,
    body: impl Fn(&Tensor, &Tensor) -> R,
) -> RolloutReport {
    train_blocks(2, early_stop, body)
}

fn train_blocks<R: ReplayOutput<Value = Tensor>>(
    blocks: usize,
    early_stop: EarlyStop,
    body: impl Fn(&Tensor, &Tensor) -> R,
) -> RolloutReport {
    let x = randn(3, &[5, 4], Kind::Float);
    let plain = setup();
    let call = |x: &Tensor| R::from_tensors(body(x, &plain.model).into_tensors().unwrap());
    tch::manual_seed(11);
    let expected_loss = (0..blocks).fold(x.shallow_clone(), |x, _| call(&x)).square().sum(Kind::Float);
    let expected_stream = Tensor::rand([3], (Kind::Float, Device::Cpu));
    expected_loss.backward();

    let setup = setup();
    let w = &setup.model;
    tch::manual_seed(11);
    let rollout = Rollout::builder(&setup.vs).early_stop(early_stop).build();
    let block = |x: &Tensor| {
        let options = BlockOptions::new("step").early_stop(true);
        rollout.block_with(options, &[("x", x)], |_, i| body(&i[0], w)).unwrap()
    };
    let loss = (0..blocks).fold(x.shallow_clone(), |x, _| block(&x)).square().sum(Kind::Float);
    let stream = Tensor::rand([3], (Kind::Float, Device::Cpu));
    let report = rollout.backward(&loss).unwrap();
    assert_eq!(bytes(&expected_loss), bytes(&loss));
    assert_eq!(bytes(&expected_stream), bytes(&stream));
    assert_eq!(bytes(&plain.model.grad()), bytes(&setup.model.grad()));
    report
}

/// Plain autograd adds the uses of one weight in another order than a rollout where a block uses it twice; so each uses it once.
fn mlp(x: &Tensor, w: &Tensor) -> Tensor {
    x + x.matmul(w).gelu("none")
}

#[test]
fn a_replay_ends_with_the_last_tensor_that_is_saved() {
    let (runs, ends) = (Cell::new(0), Cell::new(0));
    let report = train(EarlyStop::Marked, |x, w| {
        runs.set(runs.get() + 1);
        let h = x.matmul(w).gelu("none");
        // What adds saves nothing; what is multiplied by a number neither.
        let y = (x + h) * 2.0;
        ends.set(ends.get() + 1);
        y
    });
    assert_eq!((report.total.replays, report.total.stopped), (2, 2));
    // Two plain calls, two forwards, two replays.
    assert_eq!((runs.get(), ends.get()), (6, 4));
    assert!(report.total.bytes_graphs > 0);
}

#[test]
fn off_and_always_run_to_the_end() {
    for early_stop in [EarlyStop::Off, EarlyStop::Always] {
        let setup = setup();
        let (w, ends) = (&setup.model, Cell::new(0));
        let rollout = Rollout::builder(&setup.vs).early_stop(early_stop).build();
        let x = randn(3, &[5, 4], Kind::Float);
        let y = rollout.block("step", &[("x", &x)], |_, i| {
            let y = mlp(&i[0], w);
            ends.set(ends.get() + 1);
            y
        });
        let report = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
        assert_eq!((ends.get(), report.total.replays, report.total.stopped), (2, 1, 0), "{early_stop:?}");
        assert_eq!(report.total.bytes_graphs > 0, early_stop == EarlyStop::Always);
    }
    assert_eq!(train(EarlyStop::Off, mlp).total.stopped, 0);
}

/// A graph that saves nothing but inputs and variables needs no replay.
#[test]
fn nothing_to_bring_is_no_replay() {
    let report = train(EarlyStop::Marked, |x, w| x + w.narrow(0, 0, 1));
    assert_eq!((report.total.replays, report.total.kept), (0, 2));
}

#[test]
fn noise_after_the_last_saved_tensor_is_not_drawn_again() {
    let report = train(EarlyStop::Marked, |x, w| {
        let y = x.matmul(w).tanh();
        &y + y.detach().randn_like()
    });
    assert_eq!(report.total.stopped, 2);
}

#[test]
fn noise_before_it_is() {
    let report =
        train(EarlyStop::Marked, |x, w| (x.matmul(w).dropout(0.5, true) + x.randn_like()).tanh() + x.rand_like());
    assert_eq!(report.total.stopped, 2);
}

#[test]
fn other_draws_before_it_are_noticed() {
    let setup = setup();
    let w = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let x = randn(3, &[5, 4], Kind::Float);
    let y = rollout.block_with(BlockOptions::new("noisy").early_stop(true), &[("x", &x)], |_, i| {
        let h = i[0].matmul(w) + i[0].rand_like();
        if is_replaying() {
            drop(i[0].rand_like());
        }
        h.tanh() + 1.0
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::RngDiverged { block, .. } if block == "noisy"), "{error}");
    assert!(!setup.model.grad().defined());
}

/// `rrelu` saves its noise before it draws it. (In training mode it cannot be called through tch 0.26, which hands its
/// flag to another parameter; a scripted module can.)
#[test]
fn an_operation_that_fills_what_it_has_saved_is_replayed_in_full() {
    let report = train(EarlyStop::Marked, |x, w| x + x.matmul(w).rrelu(false));
    assert_eq!((report.total.replays, report.total.stopped), (2, 0));
}

/// An input that the outputs do not depend on has a leaf that nothing else holds.
#[test]
fn an_input_that_a_body_keeps_aside_keeps_its_values() {
    let setup = setup();
    let (w, stash) = (&setup.model, RefCell::new(Tensor::new()));
    let [x, logged] = [3, 4].map(|seed| randn(seed, &[5, 4], Kind::Float).set_requires_grad(true));
    let rollout = Rollout::new(&setup.vs);
    let inputs = [("x", &x), ("logged", &logged)];
    let y = rollout.block_with(BlockOptions::new("logs").early_stop(true), &inputs, |_, i| {
        let _ = stash.replace(i[1].shallow_clone());
        i[0].matmul(w).tanh() + 1.0
    });
    assert_eq!(bytes(&stash.borrow()), bytes(&logged));
    assert_eq!(rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap().total.stopped, 1);
    assert_eq!(bytes(&stash.borrow()), bytes(&logged));
}

/// Of a block that hands out nothing to differentiate, the graph is its own; and real panics are heard afterwards.
#[test]
fn what_is_left_aside_by_a_block_without_a_gradient() {
    static HEARD: AtomicUsize = AtomicUsize::new(0);
    let setup = setup();
    let (w, aside) = (&setup.model, RefCell::new(Tensor::new()));
    let rollout = Rollout::new(&setup.vs);
    let x = randn(3, &[5, 4], Kind::Float);
    let y = rollout.block_with(BlockOptions::new("aside").early_stop(true), &[("x", &x)], |_, i| {
        let h = i[0].matmul(w).tanh();
        let _ = aside.replace(h.square().sum(Kind::Float));
        h.detach()
    });
    assert!(!y.unwrap().requires_grad());
    let error = aside.take().f_backward().unwrap_err().to_string();
    assert!(error.contains("`aside`") && error.contains("return it as an output"), "{error}");
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {
        HEARD.fetch_add(1, Ordering::Relaxed);
    }));
    drop(catch_unwind(|| panic!("a real one")));
    std::panic::set_hook(before);
    assert_eq!(HEARD.load(Ordering::Relaxed), 1);
}

/// The body goes on where it was to end, twice, and saves other tensors than the forward did.
#[test]
fn a_body_that_swallows_the_end() {
    let report = train(EarlyStop::Marked, |x, w| {
        let h = x.matmul(w);
        let h = h.f_tanh().unwrap_or_else(|_| h.exp());
        let caught = catch_unwind(AssertUnwindSafe(|| &h * 2.0));
        caught.unwrap_or_else(|_| h.exp().exp()) * 0.5
    });
    assert_eq!(report.total.stopped, 2);
}

#[test]
fn a_body_that_returns_the_end_as_an_error() {
    let report =
        train(EarlyStop::Marked, |x, w| Ok::<_, BoxError>(x.f_add(&x.f_matmul(w)?.f_tanh()?)?.f_mul_scalar(2.0)?));
    assert_eq!(report.total.stopped, 2);
}

/// Its own error, of a replay that did not get to the last tensor, stays one.
#[test]
fn an_error_before_the_end_is_an_error() {
    let setup = setup();
    let w = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let x = randn(3, &[5, 4], Kind::Float);
    let y = rollout.block_with(BlockOptions::new("dry").early_stop(true), &[("x", &x)], |_, i| {
        let h = i[0].matmul(w).tanh();
        if is_replaying() { Err("the pump is dry".into()) } else { Ok::<_, BoxError>(h.tanh()) }
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::Block { source, .. } if source.to_string() == "the pump is dry"), "{error}");
    assert!(!setup.model.grad().defined());
}

#[test]
fn a_guard_alive_at_the_end_poisons_its_mutex_only_where_the_block_is_marked() {
    for marked in [false, true] {
        let setup = setup();
        let (w, count) = (&setup.model, Mutex::new(0));
        let rollout = Rollout::builder(&setup.vs).early_stop(EarlyStop::Always).build();
        let x = randn(3, &[5, 4], Kind::Float);
        let options = BlockOptions::new("guarded").early_stop(marked);
        let y = rollout.block_with(options, &[("x", &x)], |_, i| {
            let mut count = count.lock().unwrap();
            *count += 1;
            i[0].matmul(w).tanh() + 1.0
        });
        rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
        assert_eq!(count.is_poisoned(), marked);
    }
}

/// Tensors of its own, made while the body unwinds, are no second panic.
#[test]
fn destructors_may_compute_while_the_body_unwinds() {
    struct Computes<'a>(&'a Tensor, &'a AtomicUsize);
    impl Drop for Computes<'_> {
        fn drop(&mut self) {
            let y = (self.0 * self.0).tanh().exp();
            assert!(y.requires_grad());
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    let drops = AtomicUsize::new(0);
    let report = train(EarlyStop::Marked, |x, w| {
        let _computes = Computes(w, &drops);
        // In the forward it saves more than the block's own graph, which is gone by then.
        x.matmul(w).tanh() + 1.0
    });
    assert_eq!((report.total.stopped, drops.load(Ordering::Relaxed)), (2, 6));
}

#[test]
fn a_gradient_taken_inside_is_replayed_in_full() {
    let report = train(EarlyStop::Marked, |x, w| {
        let leaf = x.detach().set_requires_grad(true);
        let force = Tensor::run_backward(&[leaf.square().sum(Kind::Float)], &[&leaf], false, false).remove(0);
        x.matmul(w).tanh() + force
    });
    assert_eq!((report.total.replays, report.total.stopped), (2, 0));
}

#[test]
fn a_second_order_gradient_taken_inside() {
    // One block: inside it the weight is used twice.
    let report = train_blocks(1, EarlyStop::Marked, |x, w| {
        let leaf = x.detach().set_requires_grad(true);
        let energy = leaf.matmul(w).tanh().sum(Kind::Float);
        x + Tensor::run_backward(&[energy], &[&leaf], true, true).remove(0)
    });
    assert_eq!((report.total.replays, report.total.stopped), (1, 0));
}

/// LibTorch's own error in every mode.
#[test]
fn a_saved_tensor_that_is_changed_in_place_is_an_error() {
    for early_stop in [EarlyStop::Off, EarlyStop::Marked, EarlyStop::Always] {
        let setup = setup();
        let w = &setup.model;
        let rollout = Rollout::builder(&setup.vs).early_stop(early_stop).build();
        let x = randn(3, &[5, 4], Kind::Float);
        let y = rollout.block_with(BlockOptions::new("changes").early_stop(true), &[("x", &x)], |_, i| {
            let mut y = i[0].matmul(w).tanh();
            let z = &y * &y.detach().exp();
            let _ = y.g_add_scalar_(1.0);
            z + y
        });
        let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{early_stop:?}: {error}");
        assert!(!setup.model.grad().defined());
    }
}

#[test]
fn another_graph_in_the_replay_is_an_error_that_says_where() {
    let other: [fn(&Tensor) -> Tensor; 4] =
        [|h| h.tanh().tanh(), |h| h.exp(), |h| h.narrow(0, 0, 3).tanh(), |h| h.to_kind(Kind::Double).tanh()];
    for other in other {
        let setup = setup();
        let w = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let x = randn(3, &[5, 4], Kind::Float);
        let y = rollout.block_with(BlockOptions::new("fickle").early_stop(true), &[("x", &x)], |_, i| {
            let h = i[0].matmul(w);
            if is_replaying() { other(&h).sum(Kind::Float) } else { (h * 2.0).tanh().sum(Kind::Float) }
        });
        let error = rollout.backward(&y.unwrap()).unwrap_err();
        assert!(matches!(&error, ReplayError::GraphMismatch { block, .. } if block == "fickle"), "{error}");
        assert!(!setup.model.grad().defined());
    }
}

struct Net {
    w: Tensor,
    opened: Cell<usize>,
}

struct Opens<'a>(&'a Cell<usize>);

impl ReplayContext for Opens<'_> {
    type Scope<'s>
        = ()
    where
        Self: 's;

    fn forward(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn replay(&self) -> Result<(), BoxError> {
        self.0.set(self.0.get() + 1);
        Ok(())
    }
}

impl Net {
    #[replay_block(early_stop)]
    fn step(&self, x: &Tensor) -> Tensor {
        x.matmul(&self.w).tanh() + 1.0
    }

    fn scope(&self) -> Opens<'_> {
        Opens(&self.opened)
    }

    #[replay_block(early_stop, context = Self::scope)]
    fn scoped(&self, x: &Tensor) -> Tensor {
        x.matmul(&self.w).tanh() + 1.0
    }

    #[replay_block(context = Self::scope)]
    fn around<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        self.step_replay(rollout, x)
    }

    #[replay_block(early_stop)]
    fn twice<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        let y = self.step_replay(rollout, x)?;
        self.step_replay(rollout, &y)
    }
}

#[test]
fn contexts_values_and_blocks_around_blocks_run_to_the_end() {
    let stopped = |check: Check, run: &dyn for<'m> Fn(&'m Net, &Rollout<'m>, &Tensor) -> Tensor| {
        let setup = Setup::new(|path| Net {
            w: path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 }),
            opened: Cell::new(0),
        });
        let rollout = Rollout::builder(&setup.vs).check(check).build();
        let y = run(&setup.model, &rollout, &randn(3, &[5, 4], Kind::Float));
        let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
        (report.total.replays, report.total.stopped, setup.model.opened.get())
    };
    let step: &dyn for<'m> Fn(&'m Net, &Rollout<'m>, &Tensor) -> Tensor =
        &|net, rollout, x| net.step_replay(rollout, x).unwrap();
    assert_eq!(stopped(Check::Metadata, step), (1, 1, 0));
    assert_eq!(stopped(Check::Values, step), (1, 0, 0));
    assert_eq!(stopped(Check::Metadata, &|net, rollout, x| net.scoped_replay(rollout, x).unwrap()), (1, 0, 1));
    // The context of an outer block is open around the inner one too.
    assert_eq!(stopped(Check::Metadata, &|net, rollout, x| net.around_replay(rollout, x).unwrap()), (2, 0, 2));
    // The outer block to its end, the two inside stopped.
    assert_eq!(stopped(Check::Metadata, &|net, rollout, x| net.twice_replay(rollout, x).unwrap()), (3, 2, 0));
}

/// Its tensors are gone until the replay; with a graph that is kept it is as in plain autograd, except that the block is
/// replayed (`keep_graphs.rs`).
#[test]
fn what_a_body_leaves_aside_cannot_be_differentiated() {
    let forms: [fn(&Tensor) -> Tensor; 3] =
        [|h| h.square().sum(Kind::Float), |h| h.sum(Kind::Float), Tensor::shallow_clone];
    for form in forms {
        let setup = setup();
        let (w, aside) = (&setup.model, RefCell::new(Tensor::new()));
        let rollout = Rollout::new(&setup.vs);
        let x = randn(3, &[5, 4], Kind::Float);
        let y = rollout.block_with(BlockOptions::new("leaves").early_stop(true), &[("x", &x)], |_, i| {
            let h = i[0].matmul(w).tanh();
            let _ = aside.replace(form(&h));
            h.exp().sum(Kind::Float)
        });
        let aside = aside.take().sum(Kind::Float);
        let error = rollout.backward(&(y.unwrap() + &aside)).unwrap_err().to_string();
        assert!(error.contains("`leaves`") && error.contains("return it as an output"), "{error}");
        assert!(aside.f_backward().is_err());
        assert!(!setup.model.grad().defined());
    }
}

/// The panics by which bodies end are not the user's to see.
#[test]
fn no_panic_hook_hears_of_it() {
    static HEARD: AtomicUsize = AtomicUsize::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {
        HEARD.fetch_add(1, Ordering::Relaxed);
    }));
    let stopped = train(EarlyStop::Marked, mlp).total.stopped;
    // One that is set later is covered too.
    let ours = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        HEARD.fetch_add(1, Ordering::Relaxed);
        ours(info);
    }));
    let again = train(EarlyStop::Marked, mlp).total.stopped;
    let heard = HEARD.load(Ordering::Relaxed);
    drop(catch_unwind(|| panic!("a real one")));
    std::panic::set_hook(before);
    assert_eq!((stopped, again, heard), (2, 2, 0));
    assert_eq!(HEARD.load(Ordering::Relaxed), 2, "both hooks hear of a real one");
}

/// A million-element tensor per operation: what is refilled is gone with the block.
#[test]
fn blocks_of_many_sizes_and_a_long_chain() {
    let setup = setup();
    let w = &setup.model;
    let plain = setup_like(&setup);
    let rollout = Rollout::new(&setup.vs);
    let x = randn(3, &[5, 4], Kind::Float);
    let (mut h, mut expected) = (x.shallow_clone(), x);
    for _ in 0..200 {
        let options = BlockOptions::new("step").early_stop(true);
        h = rollout.block_with(options, &[("h", &h)], |_, i| mlp(&i[0], w) * 0.5).unwrap();
        expected = mlp(&expected, &plain) * 0.5;
    }
    let report = rollout.backward(&h.square().sum(Kind::Float)).unwrap();
    expected.square().sum(Kind::Float).backward();
    assert_eq!(report.total.stopped, 200);
    assert_eq!(bytes(&plain.grad()), bytes(&setup.model.grad()));
}

fn setup_like(setup: &Setup<Tensor>) -> Tensor {
    setup.model.detach().copy().set_requires_grad(true)
}
