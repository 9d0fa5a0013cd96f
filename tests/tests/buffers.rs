//! Guarantee *buffers*: a block that says so may update non-trainable variables; they are updated once, by the forward,
//! and each replay starts from the values that its forward found. A block that does not say so is an error.
//!
//! Gradients are compared with plain autograd: each weight is used once inside each block and nowhere else. Statistics
//! are compared with those that plain calls leave.

use replay_runtime::{BlockOptions, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::{Setup, randn, same_bits};
use tch::nn::{Module, ModuleT};
use tch::{Kind, Tensor, nn};

struct Net {
    linear: nn::Linear,
    norm: nn::BatchNorm,
}

fn net(path: &nn::Path<'_>) -> Net {
    Net {
        linear: nn::linear(path / "linear", 6, 6, nn::LinearConfig::default()),
        norm: nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default()),
    }
}

impl Net {
    fn step(&self, x: &Tensor) -> Tensor {
        self.norm.forward_t(&self.linear.forward(x), true).tanh()
    }

    #[replay_block(buffers)]
    fn block(&self, x: &Tensor) -> Tensor {
        self.step(x)
    }

    #[replay_block(buffers)]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        let h = self.block_replay(rollout, &(x * 0.5))?;
        self.block_replay(rollout, &h).map(|h| self.norm.forward_t(&h, true))
    }

    fn statistics(&self) -> [Tensor; 2] {
        [self.norm.running_mean.copy(), self.norm.running_var.copy()]
    }
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

fn assert_same(a: &[Tensor; 2], b: &[Tensor; 2]) {
    assert!(same_bits(&a[0], &b[0]) && same_bits(&a[1], &b[1]), "statistics differ: {a:?} {b:?}");
}

/// Gradients and statistics after a program, plain or replayed.
fn outcome(program: impl FnOnce(&Setup<Net>)) -> (Vec<Option<Tensor>>, [Tensor; 2]) {
    let setup = Setup::new(net);
    program(&setup);
    (setup.grads().into_values().collect(), setup.model.statistics())
}

fn assert_like_plain(plain: impl FnOnce(&Setup<Net>), replayed: impl FnOnce(&Setup<Net>)) {
    let (expected, found) = (outcome(plain), outcome(replayed));
    assert_same(&expected.1, &found.1);
    assert_eq!(expected.0.len(), found.0.len());
    for (a, b) in expected.0.iter().zip(&found.0) {
        match (a, b) {
            (None, None) => {}
            (Some(a), Some(b)) => assert!(same_bits(a, b), "{a} {b}"),
            _ => panic!("a gradient is missing"),
        }
    }
}

#[test]
fn statistics_are_updated_once() {
    assert_like_plain(
        |s| s.model.step(&s.model.step(&s.model.step(&x()))).square().sum(Kind::Float).backward(),
        |s| {
            let rollout = Rollout::new(&s.vs);
            let mut h = x();
            for _ in 0..3 {
                h = s.model.block_replay(&rollout, &h).unwrap();
            }
            rollout.backward(&h.square().sum(Kind::Float)).unwrap();
        },
    );
}

#[test]
fn forwards_without_a_backward_count_too() {
    assert_like_plain(
        |s| drop(s.model.step(&s.model.step(&x()))),
        |s| {
            let rollout = Rollout::new(&s.vs);
            let h = s.model.block_replay(&rollout, &x()).unwrap();
            drop(s.model.block_replay(&rollout, &h).unwrap());
        },
    );
    // One of two forwards is differentiated.
    assert_like_plain(
        |s| {
            s.model.step(&x()).square().sum(Kind::Float).backward();
            drop(s.model.step(&x()));
        },
        |s| {
            let rollout = Rollout::new(&s.vs);
            let loss = s.model.block_replay(&rollout, &x()).unwrap().square().sum(Kind::Float);
            drop(s.model.block_replay(&rollout, &x()).unwrap());
            rollout.backward(&loss).unwrap();
        },
    );
    // And under no_grad, where a block is a plain call.
    assert_like_plain(
        |s| drop(s.model.step(&x())),
        |s| tch::no_grad(|| drop(s.model.block_replay(&Rollout::new(&s.vs), &x()).unwrap())),
    );
}

#[test]
fn closures_say_so_by_their_options() {
    assert_like_plain(
        |s| s.model.step(&s.model.step(&x())).sum(Kind::Float).backward(),
        |s| {
            let rollout = Rollout::new(&s.vs);
            let mut h = x();
            for _ in 0..2 {
                let options = BlockOptions::new("step").buffers(true);
                h = rollout.block_with(options, &[("x", &h)], |_, i| s.model.step(&i[0])).unwrap();
            }
            rollout.backward(&h.sum(Kind::Float)).unwrap();
        },
    );
}

#[test]
fn nested_blocks_update_once_too() {
    let plain = |s: &Setup<Net>| {
        let mut h = x();
        for _ in 0..2 {
            h = s.model.norm.forward_t(&s.model.step(&s.model.step(&(h * 0.5))), true);
        }
        h.square().sum(Kind::Float)
    };
    let expected = outcome(|s| plain(s).backward());
    let found = outcome(|s| {
        let rollout = Rollout::new(&s.vs);
        let mut h = x();
        for _ in 0..2 {
            h = s.model.outer_replay(&rollout, &h).unwrap();
        }
        rollout.backward(&h.square().sum(Kind::Float)).unwrap();
    });
    assert_same(&expected.1, &found.1);
    // The weight of the norm is used inside and outside of the inner blocks, so sums associate otherwise.
    for (a, b) in expected.0.iter().flatten().zip(found.0.iter().flatten()) {
        let difference = (a - b).abs().max().double_value(&[]);
        assert!(difference <= 1e-5 * a.abs().max().double_value(&[]).max(1.0), "{a} {b}");
    }
}

/// A buffer of the user's own, which the block reads and then advances: each replay must read its own value.
struct Clock {
    weight: Tensor,
    time: Tensor,
}

fn clock(path: &nn::Path<'_>) -> Clock {
    Clock { weight: path.randn_standard("weight", &[4]), time: path.ones_no_train("time", &[1]) }
}

impl Clock {
    fn read(&self, x: &Tensor) -> Tensor {
        // A copy is multiplied: LibTorch refuses to differentiate with a saved tensor that was changed since.
        x * &self.weight * self.time.copy()
    }

    fn tick(&self, x: &Tensor) -> Tensor {
        let y = self.read(x);
        tch::no_grad(|| drop(self.time.shallow_clone().g_add_scalar_(1.0)));
        y.tanh()
    }
}

fn start() -> Tensor {
    Tensor::ones([4], (Kind::Float, tch::Device::Cpu))
}

/// The gradient of the weight after four ticks, and the time.
fn four_ticks(replay: bool) -> (Tensor, f64) {
    let setup = Setup::new(clock);
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let mut h = start();
    for _ in 0..4 {
        h = if replay { tick(&rollout, model, &h).unwrap() } else { model.tick(&h) };
    }
    let loss = h.sum(Kind::Float);
    if replay {
        drop(rollout.backward(&loss).unwrap())
    } else {
        loss.backward()
    }
    (model.weight.grad(), model.time.double_value(&[]))
}

fn tick<'m>(rollout: &Rollout<'m>, model: &'m Clock, h: &Tensor) -> Result<Tensor, ReplayError> {
    rollout.block_with(BlockOptions::new("tick").buffers(true), &[("h", h)], |_, i| model.tick(&i[0]))
}

fn read<'m>(rollout: &Rollout<'m>, model: &'m Clock, h: &Tensor) -> Result<Tensor, ReplayError> {
    rollout.block("read", &[("h", h)], |_, i| model.read(&i[0]))
}

#[test]
fn each_replay_reads_what_its_forward_read() {
    let (expected, found) = (four_ticks(false), four_ticks(true));
    assert!(same_bits(&expected.0, &found.0), "{} {}", expected.0, found.0);
    assert_eq!((expected.1, found.1), (5.0, 5.0));
}

/// A block that only reads a buffer is replayed with what it read, though others have updated it since.
#[test]
fn blocks_that_only_read_are_replayed_with_what_they_read() {
    let run = |replay: bool| {
        let setup = Setup::new(clock);
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let mut h = start();
        for _ in 0..3 {
            h = if replay { read(&rollout, model, &h).unwrap() } else { model.read(&h) };
            h = if replay { tick(&rollout, model, &h).unwrap() } else { model.tick(&h) };
        }
        let loss = h.sum(Kind::Float);
        if replay {
            drop(rollout.backward(&loss).unwrap())
        } else {
            loss.backward()
        }
        (model.weight.grad(), model.time.double_value(&[]))
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected.0, &found.0), "{} {}", expected.0, found.0);
    assert_eq!((expected.1, found.1), (4.0, 4.0));
}

/// In eval mode the kernel keeps the statistics themselves for its derivative, so they must stay put back until the
/// block is differentiated.
#[test]
fn statistics_stay_put_back_until_the_block_is_differentiated() {
    let setup = Setup::new(net);
    let model = &setup.model;
    let expected = {
        let y = model.norm.forward_t(&model.linear.forward(&x()), false);
        Tensor::run_backward(&[y.square().sum(Kind::Float)], &[&model.linear.ws], false, false).remove(0)
    };
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("eval", &[("x", &x())], |_, i| model.norm.forward_t(&model.linear.forward(&i[0]), false));
    let loss = y.unwrap().square().sum(Kind::Float);
    let unused = model.block_replay(&rollout, &x()).unwrap();
    let statistics = model.statistics();
    rollout.backward(&loss).unwrap();
    assert!(same_bits(&expected, &model.linear.ws.grad()));
    assert_same(&statistics, &model.statistics());
    drop(unused);
}

#[test]
fn what_others_do_to_a_buffer_is_still_an_error() {
    let setup = Setup::new(clock);
    let change = || drop(setup.model.time.shallow_clone().g_add_scalar_(1.0));
    let rollout = Rollout::new(&setup.vs);
    let h = tick(&rollout, &setup.model, &start()).unwrap();
    change();
    let error = rollout.backward(&h.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { variable, what: "values", .. } if variable == "time"));
    assert!((setup.model.time.double_value(&[]) - 3.0).abs() < 1e-9, "the user's value stays");

    let rollout = Rollout::new(&setup.vs);
    let h = tick(&rollout, &setup.model, &start()).unwrap();
    change();
    let h = tick(&rollout, &setup.model, &h).unwrap();
    let error = rollout.backward(&h.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { variable, .. } if variable == "time"), "{error:?}");
    assert!((setup.model.time.double_value(&[]) - 6.0).abs() < 1e-9, "the user's value stays");
    assert!(!setup.model.weight.grad().defined());
}

#[test]
fn a_failing_forward_puts_them_back() {
    for panics in [false, true] {
        let setup = Setup::new(clock);
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let run = || {
            rollout.block_with(BlockOptions::new("fails").buffers(true), &[("h", &start())], |_, i| {
                let _ = model.tick(&i[0]);
                assert!(!panics, "as asked");
                Err::<Tensor, _>("as asked")
            })
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        assert_eq!(outcome.is_err(), panics);
        assert!((model.time.double_value(&[]) - 1.0).abs() < 1e-9);
        let h = tick(&rollout, model, &start()).unwrap();
        rollout.backward(&h.sum(Kind::Float)).unwrap();
    }
}

#[test]
fn a_failing_replay_brings_the_present_values_back() {
    for nested in [false, true] {
        let setup = Setup::new(clock);
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let fails = |i: &[Tensor]| {
            let y = model.tick(&i[0]);
            if is_replaying() { Err("as asked") } else { Ok(y) }
        };
        let options = || BlockOptions::new("fails").buffers(true);
        let h = if nested {
            rollout.block_with(options(), &[("h", &start())], move |rollout, i| {
                let h = rollout.block_with(options(), &[("h", &model.tick(&i[0]))], move |_, i| fails(i))?;
                Ok::<_, ReplayError>(model.tick(&h))
            })
        } else {
            rollout.block_with(options(), &[("h", &start())], move |_, i| fails(i))
        };
        let h = tick(&rollout, model, &h.unwrap()).unwrap();
        let time = model.time.double_value(&[]);
        rollout.backward(&h.sum(Kind::Float)).unwrap_err();
        assert!((model.time.double_value(&[]) - time).abs() < 1e-9);
        let rollout = Rollout::new(&setup.vs);
        let h = tick(&rollout, model, &start()).unwrap();
        rollout.backward(&h.sum(Kind::Float)).unwrap();
    }
}

/// Such a block is still not allowed to train, to replace a buffer, to resize it or to make one.
#[test]
fn only_values_may_be_updated() {
    let write = |act: &dyn Fn(&Clock)| {
        let setup = Setup::new(clock);
        let rollout = Rollout::new(&setup.vs);
        let y = rollout.block_with(BlockOptions::new("step").buffers(true), &[("h", &start())], |_, i| {
            let y = setup.model.read(&i[0]);
            act(&setup.model);
            y
        });
        let error = y.unwrap_err();
        assert!((setup.model.time.double_value(&[]) - 1.0).abs() < 1e-9, "{error}: the buffer was not put back");
        error
    };
    let what = |error: &ReplayError, name: &str| match error {
        ReplayError::VariableWritten { block, variable, what } if block == "step" && variable == name => *what,
        error => panic!("{error:?}"),
    };
    let weight = write(&|m| tch::no_grad(|| drop(m.weight.shallow_clone().g_mul_scalar_(0.5))));
    assert_eq!(what(&weight, "weight"), "values");
    let replaced = write(&|m| m.time.shallow_clone().set_data(&m.time.copy().g_add_scalar_(1.0)));
    assert_eq!(what(&replaced, "time"), "storage");
    let resized = write(&|m| drop(m.time.shallow_clone().resize_([3])));
    assert_eq!(what(&resized, "time"), "kind, device or shape");
}

#[test]
fn a_buffer_made_in_the_block_is_an_error() {
    let setup = Setup::new(clock);
    let root = setup.vs.root();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block_with(BlockOptions::new("makes").buffers(true), &[("h", &start())], |_, i| {
        setup.model.read(&i[0]) * root.ones_no_train("late", &[4])
    });
    assert!(matches!(&y, Err(ReplayError::VariableAdded { block }) if block == "makes"), "{y:?}");
}

/// Not-a-number is a value like others.
#[test]
fn buffers_may_hold_nan() {
    let setup = Setup::new(clock);
    let _ = setup.model.time.shallow_clone().fill_(f64::NAN);
    let rollout = Rollout::new(&setup.vs);
    let h = read(&rollout, &setup.model, &start()).unwrap();
    let h = tick(&rollout, &setup.model, &h).unwrap();
    rollout.backward(&h.sum(Kind::Float)).unwrap();
}

/// A tensor saved by plain autograd around the blocks is as good as before.
#[test]
fn plain_autograd_around_the_blocks_is_not_disturbed() {
    let run = |replay: bool| {
        let setup = Setup::new(clock);
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let h = start();
        let h = if replay { tick(&rollout, model, &h).unwrap() } else { model.tick(&h) };
        let h = if replay { tick(&rollout, model, &h).unwrap() } else { model.tick(&h) };
        let loss = (h * &model.weight * &model.time).sum(Kind::Float);
        if replay {
            drop(rollout.backward(&loss).unwrap())
        } else {
            loss.backward()
        }
        model.weight.grad()
    };
    assert!(same_bits(&run(false), &run(true)));
}
