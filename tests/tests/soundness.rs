//! Guarantee *soundness*: safe code cannot make the library use what is gone, from whatever thread and in whatever
//! order rollout, model, loss and outputs end. What is not caught here by an assertion is caught by `AddressSanitizer`.

use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::rc::Rc;
use std::thread;

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{bytes, randn};
use tch::{Device, Kind, Tensor, nn};

/// A model with memory of its own to read, and a log of what was read.
struct Model {
    vs: nn::VarStore,
    w: Tensor,
    name: String,
    reads: Cell<u32>,
}

impl Model {
    fn new() -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().var_copy("w", &randn(1, &[4], Kind::Float));
        Self { vs, w, name: "a model".repeat(3), reads: Cell::new(0) }
    }

    fn read(&self) {
        assert_eq!(self.name, "a modela modela model");
        self.reads.set(self.reads.get() + 1);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.name.replace_range(.., "gone");
    }
}

/// Reads the model when it is dropped.
struct Watch<'m>(&'m Model);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.0.read();
    }
}

fn x() -> Tensor {
    randn(2, &[4], Kind::Float)
}

/// A block whose closure reads the model when it runs and when it is dropped.
fn watched<'m>(rollout: &Rollout<'m>, model: &'m Model, x: &Tensor) -> Tensor {
    let watch = Watch(model);
    rollout
        .block("watched", &[("x", x)], move |_, i| {
            // The whole of it, so that the closure owns it and not only what it borrows.
            let watch = &watch;
            let model = watch.0;
            model.read();
            (&i[0] * &model.w).tanh()
        })
        .unwrap()
}

/// Ends rollout, output and loss in one of the six orders.
fn end(order: usize, rollout: Rollout<'_>, output: Tensor, loss: Tensor) {
    let mut ends = [Some(Ending::Rollout(rollout)), Some(Ending::Tensor(output)), Some(Ending::Tensor(loss))];
    let first = order % 3;
    drop(ends[first].take());
    ends.rotate_left(first + 1);
    drop(ends[order / 3 % 2].take());
    drop(ends);
}

#[expect(dead_code, reason = "what they hold is dropped, in some order")]
enum Ending<'m> {
    Rollout(Rollout<'m>),
    Tensor(Tensor),
}

#[test]
fn every_order_of_drops() {
    for order in 0..6 {
        let model = Model::new();
        let rollout = Rollout::new(&model.vs);
        let output = watched(&rollout, &model, &x());
        let loss = watched(&rollout, &model, &output).sum(Kind::Float);
        end(order, rollout, output, loss);
        assert_eq!(model.reads.get(), 4, "two runs and two drops, in order {order}");
    }
}

#[test]
fn the_loss_outlives_rollout_and_model() {
    let (output, loss) = {
        let model = Model::new();
        let rollout = Rollout::new(&model.vs);
        let output = watched(&rollout, &model, &x());
        let loss = watched(&rollout, &model, &output).sum(Kind::Float);
        (output, loss)
    };
    let error = loss.f_backward().unwrap_err().to_string();
    assert!(error.contains("Rollout::backward"), "{error}");
    drop(output);
    thread::spawn(move || drop(loss)).join().unwrap();
}

#[test]
fn a_leaked_rollout_never_touches_its_model_again() {
    let loss = {
        let model = Model::new();
        let rollout = Rollout::new(&model.vs);
        let output = watched(&rollout, &model, &x());
        let loss = watched(&rollout, &model, &output).sum(Kind::Float);
        std::mem::forget(rollout);
        drop(output);
        assert_eq!(model.reads.get(), 2);
        loss
    };
    assert!(loss.f_backward().is_err());
    // Another rollout cannot be talked into it either.
    let other = Model::new();
    let rollout = Rollout::new(&other.vs);
    let error = rollout.backward(&(&loss + watched(&Rollout::new(&other.vs), &other, &x()).sum(Kind::Float)));
    assert!(matches!(error, Err(ReplayError::OtherRollout { .. })), "{error:?}");
    thread::spawn(move || drop(loss)).join().unwrap();
}

#[test]
fn losses_are_dropped_on_other_threads_before_and_after_the_rollout() {
    let model = Model::new();
    let rollout = Rollout::new(&model.vs);
    let early = watched(&rollout, &model, &x());
    let late = watched(&rollout, &model, &x());
    thread::spawn(move || drop(early)).join().unwrap();
    assert_eq!(model.reads.get(), 2, "the other thread drops no closure");
    let next = watched(&rollout, &model, &x());
    assert_eq!(model.reads.get(), 4, "the rollout does, at its next block");
    drop(rollout);
    assert_eq!(model.reads.get(), 6);
    thread::spawn(move || drop((late, next))).join().unwrap();
    assert_eq!(model.reads.get(), 6);
}

#[test]
fn after_backward_nothing_is_left() {
    let loss = {
        let model = Model::new();
        let rollout = Rollout::new(&model.vs);
        let unused = watched(&rollout, &model, &x());
        let loss = watched(&rollout, &model, &x()).sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        assert_eq!(model.reads.get(), 5, "two forwards, a replay and two drops");
        drop(unused);
        loss
    };
    assert!(loss.f_backward().is_err());
}

/// The loss is dropped by a body, while the engine is on its way through it.
#[test]
fn a_body_drops_the_loss_that_is_differentiated() {
    let model = Model::new();
    let outputs = RefCell::new(Vec::new());
    let rollout = Rollout::new(&model.vs);
    let mut h = x();
    for _ in 0..3 {
        let (outputs, watch) = (&outputs, Watch(&model));
        h = rollout
            .block("drops", &[("h", &h)], move |_, i| {
                if is_replaying() {
                    outputs.borrow_mut().clear();
                }
                let watch = &watch;
                &i[0] * &watch.0.w
            })
            .unwrap();
        outputs.borrow_mut().push(h.shallow_clone());
    }
    let loss = h.sum(Kind::Float);
    drop(h);
    rollout.backward(&loss).unwrap();
    assert!(outputs.take().is_empty() && model.w.grad().defined());
}

/// While this thread's token is set, a foreign pass inside a replayed body is still a foreign one.
#[test]
fn a_foreign_pass_inside_a_replayed_body_is_refused() {
    let model = Model::new();
    let stash = RefCell::new(None);
    let rollout = Rollout::new(&model.vs);
    let first = watched(&rollout, &model, &x());
    stash.replace(Some(first.sum(Kind::Float)));
    let refused = Cell::new(0);
    let y = rollout
        .block("greedy", &[("first", &first)], |_, i| {
            if is_replaying() {
                let error = stash.borrow().as_ref().unwrap().f_backward().unwrap_err().to_string();
                assert!(error.contains("Rollout::backward"), "{error}");
                refused.set(refused.get() + 1);
            }
            &i[0] * &model.w
        })
        .unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(refused.get(), 1);
    assert!(model.w.grad().defined());
}

/// The same from a thread that the body starts and waits for, and so with closures that are not sent anywhere.
#[test]
fn a_foreign_pass_on_a_thread_of_the_body_is_refused() {
    let model = Model::new();
    let stash = RefCell::new(None);
    let rollout = Rollout::new(&model.vs);
    let first = watched(&rollout, &model, &x());
    stash.replace(Some(first.sum(Kind::Float)));
    let y = rollout
        .block("greedy", &[("first", &first)], |_, i| {
            if is_replaying() {
                let loss = stash.take().unwrap();
                let error = thread::spawn(move || loss.f_backward().unwrap_err().to_string()).join().unwrap();
                assert!(error.contains("Rollout::backward"), "{error}");
            }
            &i[0] * &model.w
        })
        .unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
}

/// Runs and differentiates a rollout of its own inside a body, in the forward and in the replay.
#[test]
fn a_rollout_inside_a_body() {
    let (outer, inner) = (Model::new(), Model::new());
    let rollout = Rollout::new(&outer.vs);
    let y = rollout
        .block("outer", &[("x", &x())], |_, i| {
            let own = Rollout::new(&inner.vs);
            let loss = watched(&own, &inner, &i[0].detach()).sum(Kind::Float);
            let replaying = is_replaying();
            own.backward(&loss).unwrap();
            assert_eq!(is_replaying(), replaying, "after the other's replays as before");
            &i[0] * &outer.w
        })
        .unwrap();
    let once = bytes(&inner.w.grad());
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(bytes(&outer.w.grad()), bytes(&x()));
    // The inner pass ran twice and adds to its own gradients each time.
    assert_eq!(bytes(&(inner.w.grad() / 2.0)), once);
    assert_eq!(inner.reads.get(), 6);
}

/// A rollout that lives forever can be captured by a body, instead of the handle that the body is given.
#[test]
fn a_leaked_rollout_is_used_inside_a_leaf_body() {
    let model: &'static Model = Box::leak(Box::new(Model::new()));
    let rollout: &'static Rollout<'static> = Box::leak(Box::new(Rollout::new(&model.vs)));
    let y = rollout.block("outer", &[("x", &x())], move |_, i| watched(rollout, model, &i[0]).sin()).unwrap();
    assert!(y.requires_grad());
    assert!(y.sum(Kind::Float).f_backward().is_err());

    // In a block of another rollout, its nodes are strangers.
    let owner = Model::new();
    let outer = Rollout::new(&owner.vs);
    let y = outer.block("outer", &[("x", &x())], move |_, i| watched(rollout, model, &i[0]) * 2.0).unwrap();
    let error = outer.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::OtherRollout { .. }), "{error}");
    drop(y);
}

/// A closure that holds its own rollout, which by then is being consumed.
#[test]
fn a_closure_that_holds_its_own_rollout() {
    let model: &'static Model = Box::leak(Box::new(Model::new()));
    let slot: Rc<RefCell<Option<Rollout<'static>>>> = Rc::new(RefCell::new(Some(Rollout::new(&model.vs))));
    let own = Rc::clone(&slot);
    let y = {
        let slot = slot.borrow();
        let rollout = slot.as_ref().unwrap();
        rollout
            .block("holds", &[("x", &x())], move |_, i| {
                assert!(own.try_borrow_mut().is_err() || is_replaying());
                let held = own.borrow();
                held.as_ref().map_or_else(|| &i[0] * &model.w, |own| watched(own, model, &i[0]))
            })
            .unwrap()
    };
    let rollout = slot.take().unwrap();
    let error = rollout.backward(&y.sum(Kind::Float));
    assert!(error.is_ok(), "{error:?}");
    assert_eq!(Rc::strong_count(&slot), 1, "the closure is gone");
}

/// The cycle of a rollout that owns a closure that owns the rollout leaks, and is broken by taking the rollout out.
#[test]
fn a_closure_that_keeps_its_own_rollout_alive() {
    let model: &'static Model = Box::leak(Box::new(Model::new()));
    let slot: Rc<RefCell<Option<Rc<Rollout<'static>>>>> = Rc::default();
    slot.replace(Some(Rc::new(Rollout::new(&model.vs))));
    let own = Rc::clone(&slot);
    let rollout = slot.borrow().clone().unwrap();
    let y = rollout.block("holds", &[("x", &x())], move |_, i| {
        // The last other owner goes while the block runs.
        own.take();
        &i[0] * &model.w
    });
    assert_eq!(Rc::strong_count(&slot), 2);
    drop(rollout);
    assert_eq!(Rc::strong_count(&slot), 1);
    assert!(y.unwrap().sum(Kind::Float).f_backward().is_err());
}

/// Panics when it is dropped.
struct Bomb<'m>(#[expect(dead_code, reason = "borrows")] &'m Model, &'m Cell<bool>);

impl Drop for Bomb<'_> {
    fn drop(&mut self) {
        if self.1.get() {
            panic_any("dropped");
        }
    }
}

fn armed<'m>(rollout: &Rollout<'m>, model: &'m Model, fuse: &'m Cell<bool>, x: &Tensor) -> Tensor {
    let bomb = Bomb(model, fuse);
    rollout
        .block("armed", &[("x", x)], move |_, i| {
            black_box(&bomb);
            &i[0] * &model.w
        })
        .unwrap()
}

fn assert_dropped(run: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"dropped"));
}

#[test]
fn a_panic_in_the_drop_of_a_capture() {
    let (model, fuse) = (Model::new(), Cell::new(false));
    // At the next block.
    let rollout = Rollout::new(&model.vs);
    drop(armed(&rollout, &model, &fuse, &x()));
    fuse.set(true);
    assert_dropped(|| drop(watched(&rollout, &model, &x())));
    fuse.set(false);
    let y = watched(&rollout, &model, &x());
    // When the rollout is dropped, with others to be dropped too.
    let z = armed(&rollout, &model, &fuse, &y);
    fuse.set(true);
    assert_dropped(|| drop(rollout));
    drop((y, z));
}

/// In a replay the capture is dropped inside the engine's callback.
#[test]
fn a_panic_in_the_drop_of_a_capture_inside_backward() {
    let (model, fuse) = (Model::new(), Cell::new(false));
    let rollout = Rollout::new(&model.vs);
    let y = watched(&rollout, &model, &armed(&rollout, &model, &fuse, &x()));
    let loss = y.sum(Kind::Float);
    fuse.set(true);
    assert_dropped(|| drop(rollout.backward(&loss)));
    assert!(!model.w.grad().defined());
    assert!(loss.f_backward().is_err());
}

/// The first reason for a failure counts: here the body's, before its capture is dropped.
#[test]
fn a_panic_on_top_of_a_failed_replay() {
    let (model, fuse) = (Model::new(), Cell::new(false));
    let rollout = Rollout::new(&model.vs);
    let (bomb, w, armed) = (Bomb(&model, &fuse), &model.w, &fuse);
    let y = rollout
        .block("both", &[("x", &x())], move |_, i| {
            black_box(&bomb);
            armed.set(is_replaying());
            if is_replaying() { Err("no") } else { Ok(&i[0] * w) }
        })
        .unwrap();
    assert_dropped(|| drop(rollout.backward(&y.sum(Kind::Float))));
    assert!(!model.w.grad().defined());
}

/// Makes a block fail while its thread ends, after the library's own thread-locals are gone.
#[test]
fn an_error_while_a_thread_ends() {
    struct AtExit;
    impl Drop for AtExit {
        fn drop(&mut self) {
            // Too long a name for a string to keep without allocating.
            let name = "outside".repeat(9);
            let model = Model::new();
            let w = model.w.shallow_clone();
            let rollout = Rollout::new(&model.vs);
            let outside = rollout.block(&name, &[("x", &x())], move |_, i| &i[0] * &w).unwrap();
            let error = rollout.block("fails", &[("x", &x())], move |_, i| &i[0] * &outside).unwrap_err();
            assert!(error.to_string().contains(&name), "{error}");
        }
    }
    thread_local!(static AT_EXIT: AtExit = const { AtExit });
    thread::spawn(|| {
        // Registered first, so it is dropped after everything that the failure below registers.
        AT_EXIT.with(|_| ());
        drop(AtExit);
    })
    .join()
    .unwrap();
}

/// A rollout in a thread-local ends with its thread.
#[test]
fn a_rollout_ends_with_its_thread() {
    thread_local!(static KEPT: RefCell<Vec<(Rollout<'static>, Tensor)>> = const { RefCell::new(Vec::new()) });
    let model: &'static Model = Box::leak(Box::new(Model::new()));
    let vs: &'static nn::VarStore = Box::leak(Box::new(nn::VarStore::new(Device::Cpu)));
    let w = model.w.shallow_clone();
    thread::spawn(move || {
        let rollout = Rollout::new(vs);
        let y = rollout.block("kept", &[("x", &x())], move |_, i| &i[0] * &w).unwrap();
        KEPT.with_borrow_mut(|kept| kept.push((rollout, y)));
    })
    .join()
    .unwrap();
}

/// A body that keeps its leaves and outputs finds them intact when everything else is gone.
#[test]
fn a_body_keeps_its_tensors() {
    let kept = Rc::new(RefCell::new(Vec::new()));
    {
        let model = Model::new();
        let rollout = Rollout::new(&model.vs);
        let (keep, w) = (Rc::clone(&kept), &model.w);
        let y = rollout
            .block("keeps", &[("x", &x().set_requires_grad(true))], move |_, i| {
                let y = &i[0] * w;
                keep.borrow_mut().extend([i[0].shallow_clone(), y.shallow_clone()]);
                y
            })
            .unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
    }
    for pair in kept.take().chunks(2) {
        assert_eq!(bytes(&pair[0]), bytes(&x()));
        assert!(pair[1].requires_grad());
    }
}

/// Neither a rollout nor a reference to it may go to another thread.
mod bound_to_its_thread {
    use replay_runtime::Rollout;

    /// Has one implementation for `T`, or two where `T` is what it must not be, and then `_` below is ambiguous.
    trait NotSend<Marker> {
        fn check() {}
    }
    trait NotSync<Marker> {
        fn check() {}
    }
    struct Unwanted;

    impl<T: ?Sized> NotSend<()> for T {}
    impl<T: ?Sized + Send> NotSend<Unwanted> for T {}
    impl<T: ?Sized> NotSync<()> for T {}
    impl<T: ?Sized + Sync> NotSync<Unwanted> for T {}

    #[test]
    fn checked_by_the_compiler() {
        <Rollout<'static> as NotSend<_>>::check();
        <Rollout<'static> as NotSync<_>>::check();
    }
}
