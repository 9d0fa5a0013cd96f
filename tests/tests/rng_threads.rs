//! Guarantee *RNG*, with several threads: LibTorch has one CPU generator for the whole process, so blocks that draw wait for
//! each other while several threads have rollouts. Blocks that draw nothing do not.
//!
//! Each thread compares its gradients with the numbers that its own forward drew.

use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use replay_runtime::{BlockOptions, ReplayError, Rollout, is_replaying};
use replay_tests::same_bits;
use tch::{Device, Kind, Tensor, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn ones() -> Tensor {
    Tensor::ones([8], CPU).set_requires_grad(true)
}

/// A step of training with two blocks that draw and draws around them: the block multiplies by its mask and hands the mask
/// out, and so must its gradient. Whether it is right.
fn step(vs: &nn::VarStore, serialize: bool) -> Result<bool, ReplayError> {
    let x = Tensor::ones([64], CPU).set_requires_grad(true);
    let noise = Tensor::rand([64], CPU);
    let rollout = Rollout::builder(vs).serialize_rng(serialize).build();
    let draw = |_: &Rollout<'_>, i: &[Tensor]| {
        let mask = i[0].dropout(0.5, true).detach() + Tensor::rand([64], CPU);
        (&i[0] * &mask, mask)
    };
    let (h, first): (Tensor, Tensor) = rollout.block("first", &[("x", &x)], draw)?;
    let h = h + noise + Tensor::randn([64], CPU);
    let (y, second): (Tensor, Tensor) = rollout.block("second", &[("h", &h)], draw)?;
    rollout.backward(&y.sum(Kind::Float))?;
    Ok(same_bits(&x.grad(), &(first * second).detach()))
}

/// Wrong gradients and errors of 800 steps on four threads.
fn train(serialize: bool, acquainted: bool) -> (usize, usize) {
    let ready = Barrier::new(4);
    let run = || {
        tch::set_num_threads(1);
        let vs = nn::VarStore::new(Device::Cpu);
        // The first to come learns of the others with its next rollout.
        for _ in 0..2 {
            drop(acquainted.then(|| Rollout::new(&vs)));
            ready.wait();
        }
        let outcomes: Vec<_> = (0..200).map(|_| step(&vs, serialize)).collect();
        let wrong = outcomes.iter().filter(|outcome| matches!(outcome, Ok(false))).count();
        (wrong, outcomes.iter().filter(|outcome| outcome.is_err()).count())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    })
}

#[test]
fn four_threads_draw_and_no_gradient_of_eight_hundred_is_wrong() {
    assert_eq!(train(true, true), (0, 0));
}

/// A thread that draws before it has ever made a rollout is outside of the guarantee. What it disturbs is an error, at
/// the start, and not silence.
#[test]
fn threads_that_are_not_known_yet_do_no_silent_harm() {
    let (wrong, errors) = train(true, false);
    assert_eq!(wrong, 0);
    assert!(errors <= 8, "{errors} of 800 steps failed");
}

/// Numbers do get mixed up without the lock, so the tests above can fail; and then it is an error and not silence.
#[test]
fn without_the_lock_a_mix_up_is_an_error() {
    let (wrong, errors) = train(false, true);
    assert_eq!(wrong, 0);
    assert!(errors > 0, "nothing was mixed up");
}

/// A thread that has a rollout without the lock, and draws when it is asked to.
struct Drawer {
    ask: Option<mpsc::Sender<()>>,
    drawn: mpsc::Receiver<()>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drawer {
    fn new() -> Self {
        let (ask, asked) = mpsc::channel::<()>();
        let (answer, drawn) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let vs = nn::VarStore::new(Device::Cpu);
            let _rollout = Rollout::builder(&vs).serialize_rng(false).build();
            answer.send(()).unwrap();
            for () in asked {
                let _ = Tensor::rand([3], CPU);
                answer.send(()).unwrap();
            }
        });
        drawn.recv().unwrap();
        Self { ask: Some(ask), drawn, thread: Some(thread) }
    }

    fn draw(&self) {
        self.ask.as_ref().expect("until it is dropped").send(()).unwrap();
        self.drawn.recv().unwrap();
    }
}

/// The thread has ended by then, and counts no more.
impl Drop for Drawer {
    fn drop(&mut self) {
        drop(self.ask.take());
        self.thread.take().expect("until it is dropped").join().unwrap();
    }
}

/// The other thread draws between the block's forward and its end, for certain.
#[test]
fn numbers_of_others_in_between_are_noticed_by_the_outputs() {
    let other = Drawer::new();
    let vs = nn::VarStore::new(Device::Cpu);
    let x = ones();
    let rollout = Rollout::builder(&vs).serialize_rng(false).build();
    let body = |_: &Rollout<'_>, i: &[Tensor]| {
        let y = &i[0] * Tensor::rand([8], CPU);
        if !is_replaying() {
            other.draw();
        }
        y * Tensor::rand([8], CPU)
    };
    let y = rollout.block("mixed", &[("x", &x)], body).unwrap();
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::ValuesDiffer { block, output: 0, .. } if block == "mixed"), "{error:?}");
    assert!(!x.grad().defined());
}

/// Runs `body` while another thread is in the middle of a block that has drawn, and holds it there meanwhile. What becomes
/// of that thread's rollout.
fn drawing_block_beside(body: impl FnOnce()) -> Result<(), ReplayError> {
    let (begun, has_begun) = mpsc::channel::<()>();
    let (end, may_end) = mpsc::channel::<()>();
    let other = thread::spawn(move || {
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        let drawn = rollout.block("draws", &[("x", &ones())], |_, i| {
            let y = &i[0] * Tensor::rand([8], CPU);
            if !is_replaying() {
                begun.send(()).unwrap();
                may_end.recv_timeout(Duration::from_secs(20)).expect("the other one does not wait");
            }
            y
        });
        rollout.backward(&drawn.unwrap().sum(Kind::Float)).map(drop)
    });
    has_begun.recv().unwrap();
    body();
    end.send(()).unwrap();
    other.join().unwrap()
}

fn beside_a_drawing_block(body: impl FnOnce()) {
    drawing_block_beside(body).unwrap();
}

/// Runs `body` while another thread has a rollout; afterwards that thread draws, which it cannot while a lock is left.
fn beside_a_rollout(body: impl FnOnce()) {
    let (quit, wait) = mpsc::channel::<()>();
    let (ready, is_ready) = mpsc::channel::<()>();
    let other = thread::spawn(move || {
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        ready.send(()).unwrap();
        let _ = wait.recv();
        drop(rollout);
        assert!(step(&vs, true).unwrap());
    });
    is_ready.recv().unwrap();
    body();
    drop(quit);
    other.join().unwrap();
}

#[test]
fn a_block_that_draws_nothing_does_not_wait() {
    beside_a_drawing_block(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let x = ones();
        let rollout = Rollout::new(&vs);
        let y = rollout.block("quiet", &[("x", &x)], |_, i| i[0].sin()).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        assert!(same_bits(&x.grad(), &x.detach().cos()));
    });
}

/// A replay that draws although its forward did not, while another thread draws: nothing but the callback can tell.
#[test]
fn a_replay_that_draws_for_the_first_time_is_an_error_beside_others_too() {
    beside_a_rollout(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        let y = rollout.block("fickle", &[("x", &ones())], |_, i| {
            if is_replaying() { &i[0] * Tensor::rand([8], CPU) } else { i[0].sin() }
        });
        tch::manual_seed(4);
        let expected = Tensor::rand([4], CPU);
        tch::manual_seed(4);
        let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
        assert!(matches!(&error, ReplayError::RngDiverged { block, .. } if block == "fickle"), "{error:?}");
        assert!(same_bits(&expected, &Tensor::rand([4], CPU)), "the caller's stream was disturbed");
    });
}

/// A thread that has had a rollout draws in its turn outside of blocks too.
#[test]
fn a_draw_outside_of_blocks_waits() {
    let (drawn, is_drawn) = mpsc::channel::<()>();
    let mut waits = None;
    beside_a_drawing_block(|| {
        let (ready, is_ready) = mpsc::channel::<()>();
        waits = Some(thread::spawn(move || {
            let vs = nn::VarStore::new(Device::Cpu);
            drop(Rollout::new(&vs));
            ready.send(()).unwrap();
            let _ = Tensor::rand([4], CPU);
            drawn.send(()).unwrap();
        }));
        is_ready.recv().unwrap();
        let outcome = is_drawn.recv_timeout(Duration::from_millis(200));
        assert_eq!(outcome, Err(mpsc::RecvTimeoutError::Timeout), "it did not wait");
    });
    is_drawn.recv().unwrap();
    waits.unwrap().join().unwrap();
}

/// Without the order a block does not wait for one that has drawn. Both choices in one process do not go together, and
/// the other one notices.
#[test]
fn without_the_lock_a_block_that_draws_does_not_wait() {
    let outcome = drawing_block_beside(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let x = ones();
        let rollout = Rollout::builder(&vs).serialize_rng(false).build();
        let draw = |_: &Rollout<'_>, i: &[Tensor]| {
            let mask = Tensor::rand([8], CPU);
            (&i[0] * &mask, mask)
        };
        let (y, mask): (Tensor, Tensor) = rollout.block("draws", &[("x", &x)], draw).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        assert!(same_bits(&x.grad(), &mask.detach()));
    });
    assert!(matches!(&outcome, Err(ReplayError::RngDiverged { .. })), "{outcome:?}");
}

/// The state goes back to before the failing block's first draw, and the lock is given back.
#[test]
fn a_failing_block_beside_others_puts_the_generator_back() {
    beside_a_rollout(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let draw = || Tensor::rand([4], CPU);
        tch::manual_seed(4);
        let expected = draw();
        tch::manual_seed(4);
        let rollout = Rollout::new(&vs);
        let failing = rollout.block("fails", &[("x", &ones())], |_, i| {
            let _ = i[0].dropout(0.5, true);
            Err::<Tensor, _>("as asked")
        });
        failing.unwrap_err();
        let panicking = || {
            rollout.block("panics", &[("x", &ones())], |_, i| {
                let _ = i[0].dropout(0.5, true);
                assert!(i.is_empty(), "as asked");
                i[0].sin()
            })
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panicking)).unwrap_err();
        assert!(same_bits(&expected, &draw()));
    });
}

#[test]
fn nested_blocks_that_draw_on_several_threads() {
    // Whether the outer block draws before the inner one, the inner one, and the outer one after it.
    let nested = || {
        let vs = nn::VarStore::new(Device::Cpu);
        for which in 0..80 {
            let x = ones();
            let rollout = Rollout::new(&vs);
            let draw = move |at: i32, i: &Tensor| {
                let mask = if which & at == 0 { Tensor::full([8], 0.5, CPU) } else { Tensor::rand([8], CPU) };
                (i * &mask, mask)
            };
            let outer = rollout.block("outer", &[("x", &x)], move |rollout, i| {
                let (h, first) = draw(1, &i[0]);
                let (h, second) = rollout.block("inner", &[("h", &h)], move |_, i| draw(2, &i[0]))?;
                let (h, third) = draw(4, &h);
                Ok::<_, ReplayError>((h, first * second * third))
            });
            let (y, mask) = outer.unwrap();
            rollout.backward(&y.sum(Kind::Float)).unwrap();
            let difference = (x.grad() - mask).abs().max().double_value(&[]);
            assert!(difference < 1e-6, "{difference}");
        }
    };
    // Both have made a rollout before either draws.
    let ready = Barrier::new(3);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let vs = nn::VarStore::new(Device::Cpu);
                for _ in 0..2 {
                    drop(Rollout::new(&vs));
                    ready.wait();
                }
                nested();
            });
        }
    });
}

#[test]
fn without_the_generators_state_a_block_that_draws_is_an_error() {
    let check = || {
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::builder(&vs).preserve_rng_state(false).build();
        let x = ones();
        let quiet = rollout.block("quiet", &[("x", &x)], |_, i| i[0].sin()).unwrap();
        let options = BlockOptions::new("draws");
        let error = rollout.block_with(options, &[("x", &x)], |_, i| i[0].dropout(0.5, true)).unwrap_err();
        assert!(matches!(&error, ReplayError::RandomWithoutState { block } if block == "draws"), "{error:?}");
        rollout.backward(&quiet.sum(Kind::Float)).unwrap();
        assert!(same_bits(&x.grad(), &x.detach().cos()));
    };
    check();
    beside_a_rollout(check);
}

/// Attention without dropout, dropout in eval mode, an LSTM: operations that may draw, and here do not.
#[test]
fn a_block_that_could_draw_and_does_not_is_replayed_beside_others() {
    let attend = |i: &Tensor| {
        let q = i.reshape([1, 1, 4, 2]);
        Tensor::scaled_dot_product_attention(&q, &q, &q, None::<&Tensor>, 0.0, false, None, false)
    };
    beside_a_rollout(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        let h = rollout.block("dropout", &[("x", &ones())], |_, i| i[0].dropout(0.5, false)).unwrap();
        let h = rollout.block("attention", &[("h", &h)], |_, i| attend(&i[0]).sin()).unwrap();
        rollout.backward(&h.sum(Kind::Float)).unwrap();
    });
}

/// Nor are the draws of others taken for the block's own.
#[test]
fn without_the_generators_state_the_draws_of_others_are_no_error() {
    let other = Drawer::new();
    let vs = nn::VarStore::new(Device::Cpu);
    let x = ones();
    let rollout = Rollout::builder(&vs).preserve_rng_state(false).serialize_rng(false).build();
    let y = rollout.block("quiet", &[("x", &x)], |_, i| {
        other.draw();
        i[0].sin()
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert!(same_bits(&x.grad(), &x.detach().cos()));
}

/// Dropout of nothing is an operation that could draw, and draws nothing.
#[test]
fn an_operation_that_draws_nothing_this_time_beside_others() {
    beside_a_rollout(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let x = ones();
        let rollout = Rollout::new(&vs);
        let y = rollout.block("idle", &[("x", &x)], |_, i| i[0].dropout(0.0, true).sin()).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        assert!(same_bits(&x.grad(), &x.detach().cos()));
    });
}

/// Another thread may have put the generator to where it was before the block, which then seems to have drawn nothing.
#[test]
fn a_generator_that_others_put_back_is_no_proof() {
    beside_a_rollout(|| {
        let vs = nn::VarStore::new(Device::Cpu);
        let x = ones();
        let rollout = Rollout::builder(&vs).serialize_rng(false).build();
        tch::manual_seed(4);
        let y = rollout.block("draws", &[("x", &x)], |_, i| {
            let mask = Tensor::rand([8], CPU);
            if !is_replaying() {
                thread::spawn(|| tch::manual_seed(4)).join().unwrap();
            }
            (&i[0] * &mask, mask)
        });
        let (y, mask): (Tensor, Tensor) = y.unwrap();
        tch::manual_seed(5);
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        assert!(same_bits(&x.grad(), &mask.detach()));
    });
}

/// A thread that has ended counts no more: alone again, a block is looked at by the generator's states, which show that it
/// seeded too.
#[test]
fn a_thread_that_has_ended_does_not_count() {
    thread::spawn(|| drop(Rollout::new(&nn::VarStore::new(Device::Cpu)))).join().unwrap();
    let vs = nn::VarStore::new(Device::Cpu);
    let x = ones();
    let rollout = Rollout::new(&vs);
    let y = rollout.block("seeds", &[("x", &x)], |_, i| {
        if is_replaying() {
            tch::manual_seed(8);
        }
        i[0].sin()
    });
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::RngDiverged { block, .. } if block == "seeds"), "{error:?}");
}
