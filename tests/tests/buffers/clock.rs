//! A buffer of the user's own, changed in place: what may be done to it, and what becomes of it on failures.

use replay_runtime::{BlockOptions, ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, same_bits};
use tch::{Kind, Tensor, nn};

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

fn differentiate(rollout: Rollout<'_>, loss: &Tensor, replay: bool) {
    if replay {
        rollout.backward(loss).unwrap();
    } else {
        loss.backward();
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
    differentiate(rollout, &loss, replay);
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
        differentiate(rollout, &loss, replay);
        (model.weight.grad(), model.time.double_value(&[]))
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected.0, &found.0), "{} {}", expected.0, found.0);
    assert_eq!((expected.1, found.1), (4.0, 4.0));
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
        differentiate(rollout, &loss, replay);
        model.weight.grad()
    };
    assert!(same_bits(&run(false), &run(true)));
}

/// It is what the replays of the blocks before it need, but not what the last block saw.
#[test]
fn a_buffer_that_was_changed_and_changed_back_stays_as_it_is() {
    let setup = Setup::new(clock);
    let set = |value: f64| drop(setup.model.time.shallow_clone().fill_(value));
    let rollout = Rollout::new(&setup.vs);
    let h = read(&rollout, &setup.model, &start()).unwrap();
    set(5.0);
    let _ = read(&rollout, &setup.model, &h).unwrap();
    set(1.0);
    rollout.backward(&h.sum(Kind::Float)).unwrap();
    assert!((setup.model.time.double_value(&[]) - 1.0).abs() < 1e-9);
}

/// A warm-up in the middle of a rollout: there a block is a plain call.
#[test]
fn blocks_under_no_grad_may_update_them_between_others() {
    let run = |replay: bool| {
        let setup = Setup::new(clock);
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let step = |h: &Tensor| if replay { tick(&rollout, model, h).unwrap() } else { model.tick(h) };
        let h = step(&start());
        tch::no_grad(|| drop(step(&step(&h))));
        let loss = step(&h).sum(Kind::Float);
        differentiate(rollout, &loss, replay);
        (model.weight.grad(), model.time.double_value(&[]))
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected.0, &found.0), "{} {}", expected.0, found.0);
    assert_eq!((expected.1, found.1), (5.0, 5.0));
}

/// Plain autograd saved the buffer after it was given the values again that it had.
#[test]
fn a_failing_block_brings_the_version_back_too() {
    let setup = Setup::new(clock);
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let _ = tick(&rollout, model, &start()).unwrap();
    let _ = model.time.shallow_clone().fill_(2.0);
    let loss = (&model.weight * &model.time).sum(Kind::Float);
    let failed = rollout.block_with(BlockOptions::new("fails").buffers(true), &[("h", &start())], |_, i| {
        let _ = model.tick(&i[0]);
        Err::<Tensor, _>("as asked")
    });
    failed.unwrap_err();
    loss.backward();
    assert!(same_bits(&model.weight.grad(), &(start() * 2.0)));
}

/// A variable made without training that learns all the same.
#[test]
fn a_failure_takes_the_gradient_of_a_buffer_that_requires_grad_back() {
    let setup = Setup::new(clock);
    let time = setup.model.time.set_requires_grad(true);
    let rollout = Rollout::new(&setup.vs);
    let h = rollout.block("fails", &[("h", &start().set_requires_grad(true))], |_, i| {
        if is_replaying() { Err("as asked") } else { Ok(i[0].sin()) }
    });
    let read = rollout.block("read", &[("h", &h.unwrap())], |_, i| &i[0] * &setup.model.time).unwrap();
    rollout.backward(&read.sum(Kind::Float)).unwrap_err();
    assert!(!time.grad().defined());
}

/// One in a layout that cannot be written in place is watched like a parameter.
#[test]
fn a_compressed_sparse_buffer_is_no_obstacle() {
    let setup = Setup::new(clock);
    let matrix = Tensor::eye(4, (Kind::Float, tch::Device::Cpu)).to_sparse_csr(None);
    setup.vs.variables_.lock().unwrap().named_variables.insert("matrix".to_owned(), matrix);
    let rollout = Rollout::new(&setup.vs);
    let h = tick(&rollout, &setup.model, &start()).unwrap();
    rollout.backward(&h.sum(Kind::Float)).unwrap();
    assert!(setup.model.weight.grad().defined());
}
