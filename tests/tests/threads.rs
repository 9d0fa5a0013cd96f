//! Guarantee *threads*: rollouts on several threads do not disturb each other, and outputs may go to other threads, be
//! dropped there, and be refused a backward pass there.
//!
//! No block here draws random numbers: the CPU generator is one for the whole process.

use std::sync::mpsc;
use std::thread;

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, assert_same, randn, replayed};
use tch::{Kind, Tensor, nn, nn::Module};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 8, 8, nn::LinearConfig::default())
}

fn step<'m>(rollout: &Rollout<'m>, model: &'m nn::Linear, x: &Tensor) -> Tensor {
    rollout.block("step", &[("x", x)], move |_, i| model.forward(&i[0]).tanh()).unwrap()
}

/// Models are made one after the other, since making them draws; then all run at once, many times.
#[test]
fn four_rollouts_at_once_equal_one_alone() {
    let x = || randn(3, &[16, 8], Kind::Float);
    let run = |setup: &Setup<nn::Linear>, x: &Tensor| {
        replayed(setup, |how, model, _| {
            let mut h = x.shallow_clone();
            for _ in 0..20 {
                h = how.block("outer", &[("h", &h)], |i| model.forward(&i[0]).tanh());
            }
            h.square().sum(Kind::Float)
        })
    };
    let alone = run(&Setup::new(linear), &x());
    let setups: Vec<_> = (0..4).map(|_| (Setup::new(linear), x())).collect();
    let threads: Vec<_> = setups
        .into_iter()
        .map(|(mut setup, x)| {
            thread::spawn(move || {
                tch::set_num_threads(1);
                let mut outcome = run(&setup, &x);
                for _ in 0..5 {
                    for mut variable in setup.vs.trainable_variables() {
                        variable.zero_grad();
                    }
                    outcome = run(&setup, &x);
                }
                setup.vs.freeze();
                outcome
            })
        })
        .collect();
    for thread in threads {
        assert_same(&alone, &thread.join().expect("a thread's rollout succeeds"));
    }
}

/// Blocks in blocks, past the depth where replays move to threads of the engine, which all rollouts share.
#[test]
fn deep_nests_on_two_threads_at_once() {
    fn nest<'m>(rollout: &Rollout<'m>, w: &'m Tensor, x: &Tensor, depth: usize) -> Tensor {
        rollout
            .block("nest", &[("x", x)], move |rollout, i| match depth {
                1 => (&i[0] * w).tanh(),
                _ => nest(rollout, w, &i[0], depth - 1),
            })
            .unwrap()
    }
    let expected = {
        let w = Tensor::from(0.5f32).set_requires_grad(true);
        (Tensor::from(2f32) * &w).tanh().backward();
        w.grad().double_value(&[])
    };
    let threads: Vec<_> = (0..2)
        .map(|_| {
            thread::spawn(|| {
                let vs = nn::VarStore::new(tch::Device::Cpu);
                let w = vs.root().var_copy("w", &Tensor::from(0.5f32));
                let rollout = Rollout::new(&vs);
                let y = nest(&rollout, &w, &Tensor::from(2f32), 80);
                rollout.backward(&y).unwrap();
                w.grad().double_value(&[])
            })
        })
        .collect();
    for thread in threads {
        let found = thread.join().unwrap();
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    }
}

#[test]
fn a_loss_dropped_on_another_thread_frees_its_blocks() {
    let setup = Setup::new(linear);
    let x = randn(3, &[4, 8], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let dropped = step(&rollout, &setup.model, &x).exp();
    let loss = step(&rollout, &setup.model, &x).sum(Kind::Float);
    thread::spawn(move || drop(dropped)).join().unwrap();
    let report = rollout.backward(&loss).unwrap();
    assert_eq!((report.total.forwards, report.total.replays), (2, 1));
}

/// Losses dropped on another thread all the while.
#[test]
fn a_loss_dropped_elsewhere_while_the_rollout_goes_on() {
    let setup = Setup::new(linear);
    let x = randn(3, &[4, 8], Kind::Float);
    let (send, receive) = mpsc::channel::<Tensor>();
    let dropper = thread::spawn(move || receive.into_iter().count());
    let rollout = Rollout::new(&setup.vs);
    let mut h = x.shallow_clone();
    for _ in 0..200 {
        h = step(&rollout, &setup.model, &h);
        send.send(step(&rollout, &setup.model, &x)).unwrap();
    }
    let report = rollout.backward(&h.sum(Kind::Float)).unwrap();
    drop(send);
    assert_eq!(dropper.join().unwrap(), 200);
    assert_eq!((report.total.forwards, report.total.replays), (400, 200));
}

/// The owner's replay waits until the other thread was refused, so both passes are under way at once.
#[test]
fn a_backward_pass_on_another_thread_is_refused_while_the_owners_runs() {
    let run = |disturb: bool| {
        let setup = Setup::new(linear);
        let model = &setup.model;
        let x = randn(3, &[4, 8], Kind::Float);
        let (ask, asked) = mpsc::channel::<()>();
        let (answer, answered) = mpsc::channel::<String>();
        let rollout = Rollout::new(&setup.vs);
        let h = rollout
            .block("disturbed", &[("x", &x)], move |_, i| {
                if disturb && is_replaying() {
                    ask.send(()).unwrap();
                    let refusal = answered.recv().unwrap();
                    assert!(refusal.contains("Rollout::backward"), "{refusal}");
                }
                model.forward(&i[0]).tanh()
            })
            .unwrap();
        let h = step(&rollout, model, &h);
        let theirs = h.sum(Kind::Float);
        let other = thread::spawn(move || {
            for () in asked {
                answer.send(theirs.f_backward().expect_err("it is not the owner's").to_string()).unwrap();
            }
        });
        let loss = h.square().sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        other.join().unwrap();
        replay_tests::Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(false), &run(true));
}

/// After the owner's pass, and after the rollout is gone.
#[test]
fn a_backward_pass_on_another_thread_is_refused_afterwards() {
    let setup = Setup::new(linear);
    let x = randn(3, &[4, 8], Kind::Float);
    for by_backward in [true, false] {
        let rollout = Rollout::new(&setup.vs);
        let h = step(&rollout, &setup.model, &x);
        let theirs = h.sum(Kind::Float);
        if by_backward {
            rollout.backward(&h.exp().sum(Kind::Float)).unwrap();
        } else {
            drop(rollout);
        }
        let refusal = thread::spawn(move || theirs.f_backward().unwrap_err().to_string()).join().unwrap();
        assert!(refusal.contains("replay block `step`"), "{refusal}");
    }
}

thread_local! {
    static KEPT: std::cell::RefCell<Vec<std::rc::Rc<()>>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Deep nesting takes LibTorch to threads of its own. A body that ran there could leave an `Rc` in such a thread's
/// storage, for the body of another rollout on another thread to drop.
#[test]
fn a_body_always_runs_on_its_rollouts_thread() {
    fn nest<'m>(rollout: &Rollout<'m>, w: &'m Tensor, mark: &'m std::rc::Rc<()>, x: &Tensor, depth: usize) -> Tensor {
        let own = thread::current().id();
        rollout
            .block("nest", &[("x", x)], move |rollout, i| {
                assert_eq!(thread::current().id(), own);
                KEPT.with_borrow_mut(|kept| kept.push(std::rc::Rc::clone(mark)));
                if depth == 0 { (&i[0] * w).tanh() } else { nest(rollout, w, mark, &i[0], depth - 1) }
            })
            .unwrap()
    }
    let setup = Setup::new(|path| path.var("w", &[4], nn::Init::Const(0.9)));
    let mark = std::rc::Rc::new(());
    let rollout = Rollout::new(&setup.vs);
    let y = nest(&rollout, &setup.model, &mark, &Tensor::from(0.5f32), 100);
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(std::rc::Rc::strong_count(&mark), 1 + KEPT.take().len(), "all of them were kept here");
}

/// A rollout that goes deep inside a body of one that is deep already: each brings its blocks back to this thread.
#[test]
fn deep_rollouts_inside_deep_rollouts() {
    fn nest<'m>(rollout: &Rollout<'m>, models: &'m [Setup<Tensor>], x: &Tensor, depth: usize) -> Tensor {
        let nested = move |rollout: &Rollout<'m>, i: &[Tensor]| match (depth, &models[1..]) {
            (0, []) => (&i[0] * &models[0].model).tanh(),
            (0, inner) => {
                let own = Rollout::new(&inner[0].vs);
                let y = nest(&own, inner, &i[0].detach(), 45);
                own.backward(&y.sum(Kind::Float)).unwrap();
                (&i[0] * &models[0].model).tanh()
            }
            _ => nest(rollout, models, &i[0], depth - 1),
        };
        rollout.block("nest", &[("x", x)], move |rollout, i| nested(rollout, i)).unwrap()
    }
    let setup = || Setup::new(|path| path.var("w", &[4], nn::Init::Const(0.9)));
    let models = [setup(), setup()];
    let rollout = Rollout::new(&models[0].vs);
    let y = nest(&rollout, &models, &Tensor::from(0.5f32), 45);
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert!(models.iter().all(|setup| setup.model.grad().defined()));
}

fn one_block(rollout: &Rollout<'_>, w: &Tensor) -> Tensor {
    let (x, w) = (Tensor::ones([64], (Kind::Float, tch::Device::Cpu)), w.shallow_clone());
    rollout.block("scale", &[("x", &x)], move |_, i| &i[0] * &w).unwrap()
}

/// The first value, which counts whole passes.
fn whole(tensor: &Tensor) -> i64 {
    tensor.to_kind(Kind::Int64).int64_value(&[0])
}

/// While one thread has a variable's old gradient aside, another must not add to it.
#[test]
fn two_threads_on_one_store_take_turns_or_are_told_to() {
    let vs = nn::VarStore::new(tch::Device::Cpu);
    let _ = vs.root().var("w", &[64], nn::Init::Const(0.5));
    let passes = |restore: bool| {
        let done = thread::scope(|scope| {
            let pass = || {
                let w = &vs.variables()["w"];
                let mut done = 0;
                for _ in 0..200 {
                    let rollout = Rollout::builder(&vs).restore_gradients(restore).build();
                    let loss = one_block(&rollout, w).sum(Kind::Float);
                    match rollout.backward(&loss) {
                        Ok(_) => done += 1,
                        Err(error) => assert!(matches!(error, ReplayError::VariableShared { .. }), "{error}"),
                    }
                }
                done
            };
            let threads = [scope.spawn(pass), scope.spawn(pass)];
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<i64>()
        });
        let mut w = vs.variables().remove("w").unwrap();
        let sum = whole(&w.grad());
        w.zero_grad();
        (done, sum)
    };
    let (done, sum) = passes(true);
    assert!(done > 0 && sum == done, "{done} passes added up to {sum}");
    assert_eq!(passes(false), (400, 400), "without the transaction, LibTorch's own lock is enough");
}

/// A pass of another thread that comes by between the two halves of a block leaves its gradient alone.
#[test]
fn foreign_passes_during_a_backward_disturb_nothing() {
    let setup = Setup::new(|path| path.var("w", &[64], nn::Init::Const(0.5)));
    for _ in 0..1000 {
        let rollout = Rollout::new(&setup.vs);
        let output = one_block(&rollout, &setup.model);
        let loss = output.sum(Kind::Float);
        let theirs = (output * 7.0).sum(Kind::Float);
        let (start, started) = mpsc::channel();
        let (stop, stopped) = mpsc::channel::<()>();
        let stranger = thread::spawn(move || {
            start.send(()).unwrap();
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                assert!(theirs.f_backward().is_err());
            }
        });
        started.recv().unwrap();
        rollout.backward(&loss).unwrap();
        drop(stop);
        stranger.join().unwrap();
    }
    assert_eq!(whole(&setup.model.grad()), 1000);
}

/// LibTorch adds to a gradient under a lock, and moving one aside and back takes the same.
#[test]
fn plain_autograd_on_another_thread_adds_to_the_same_variables() {
    let vs = nn::VarStore::new(tch::Device::Cpu);
    let _ = vs.root().var("w", &[64], nn::Init::Const(0.5));
    thread::scope(|scope| {
        scope.spawn(|| {
            let w = &vs.variables()["w"];
            for _ in 0..500 {
                (w * 1.0).sum(Kind::Float).backward();
            }
        });
        scope.spawn(|| {
            let w = &vs.variables()["w"];
            for _ in 0..500 {
                let rollout = Rollout::new(&vs);
                let loss = one_block(&rollout, w).sum(Kind::Float);
                rollout.backward(&loss).unwrap();
            }
        });
    });
    assert_eq!(whole(&vs.variables()["w"].grad()), 1000);
}

/// For certain: the other thread's pass comes while a replay of this one's is under way, and also when a rollout inside
/// that replay had the same gradients aside and has ended.
#[test]
fn a_second_thread_is_refused_while_the_first_has_gradients_aside() {
    for inside in [false, true] {
        let vs = nn::VarStore::new(tch::Device::Cpu);
        let w = &vs.root().var("w", &[64], nn::Init::Const(0.5));
        let (ask, asked) = mpsc::channel::<()>();
        let (answer, answered) = mpsc::channel();
        let other = || {
            let w = &vs.variables()["w"];
            for () in asked {
                let rollout = Rollout::new(&vs);
                let loss = one_block(&rollout, w).sum(Kind::Float);
                answer.send(rollout.backward(&loss).map(drop)).unwrap();
            }
        };
        thread::scope(|scope| {
            scope.spawn(other);
            let rollout = Rollout::new(&vs);
            let store = &vs;
            let waits = move |_: &Rollout<'_>, i: &[Tensor]| {
                if is_replaying() {
                    if inside {
                        let own = Rollout::new(store);
                        let loss = one_block(&own, w).sum(Kind::Float);
                        own.backward(&loss).unwrap();
                    }
                    ask.send(()).unwrap();
                    let outcome = answered.recv().unwrap();
                    assert!(matches!(outcome, Err(ReplayError::VariableShared { .. })), "{outcome:?}");
                }
                &i[0] * w
            };
            let h = rollout.block("waits", &[("x", &w.ones_like())], waits).unwrap();
            let loss = (h + one_block(&rollout, w)).sum(Kind::Float);
            rollout.backward(&loss).unwrap();
        });
        assert_eq!(whole(&w.grad()), if inside { 3 } else { 2 });
    }
}
