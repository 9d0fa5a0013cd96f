//! Guarantee *buffers*: what runs between the replays, and changes that are not the blocks' own.

use std::cell::Cell;

use replay_runtime::{BlockOptions, ReplayError, Rollout};
use replay_tests::{Setup, same_bits};
use tch::{Device, Kind, Tensor};

/// A weight, and a buffer that some blocks advance.
struct Clock {
    weight: Tensor,
    time: Tensor,
}

fn setup() -> Setup<Clock> {
    // Whole numbers, whose sums have the same bits in any order.
    let weight = Tensor::from_slice(&[1f32, 2.0, 3.0, -4.0]);
    Setup::new(|path| Clock { weight: path.var_copy("weight", &weight), time: path.ones_no_train("time", &[1]) })
}

fn x() -> Tensor {
    Tensor::ones([4], (Kind::Float, Device::Cpu))
}

impl Clock {
    fn tick(&self, x: &Tensor) -> Tensor {
        let y = x * &self.weight * self.time.copy();
        let _ = self.time.shallow_clone().g_add_scalar_(1.0);
        y
    }
}

fn tick<'m>(rollout: &Rollout<'m>, model: &'m Clock, h: &Tensor) -> Result<Tensor, ReplayError> {
    rollout.block_with(BlockOptions::new("tick").buffers(true), &[("h", h)], |_, i| model.tick(&i[0]))
}

/// LibTorch takes the node with the highest number first, and numbers are per thread: what stands before a node of another
/// thread is differentiated after the blocks, and reads the buffer as the caller left it.
#[test]
fn a_graph_that_is_differentiated_after_a_replay_finds_the_present_buffers() {
    let run = |replay: bool| {
        let setup = setup();
        let model = &setup.model;
        let rollout = Rollout::new(&setup.vs);
        let step = |h: &Tensor| if replay { tick(&rollout, model, h).unwrap() } else { model.tick(h) };
        let second = step(&step(&x()));
        let around = &model.weight * &model.time;
        let around = std::thread::spawn(move || around * 2.0).join().unwrap();
        let loss = (second + around).sum(Kind::Float);
        if replay {
            rollout.backward(&loss).unwrap();
        } else {
            loss.backward();
        }
        model.weight.grad()
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected, &found), "{expected} {found}");
}

/// A variable that is added in between does not hide what was done to another.
#[test]
fn a_change_beside_a_new_variable_is_still_an_error() {
    for between in [false, true] {
        let setup = setup();
        let model = &setup.model;
        let root = setup.vs.root();
        let rollout = Rollout::new(&setup.vs);
        let h = tick(&rollout, model, &x()).unwrap();
        let _ = model.time.shallow_clone().g_add_scalar_(10.0);
        if between {
            let _ = root.ones_no_train("late", &[1]);
        }
        let h = tick(&rollout, model, &h).unwrap();
        let error = rollout.backward(&h.sum(Kind::Float)).unwrap_err();
        assert!(matches!(&error, ReplayError::VariableChanged { variable, .. } if variable == "time"), "{error}");
        assert!((model.time.double_value(&[]) - 13.0).abs() < 1e-9, "the present value stays");
    }
}

/// A block that advances the clock before and after a block inside it does, between two others. The inner one may fail in
/// its own replay, when the buffers were put back twice.
fn nested(fail: bool) -> (Tensor, f64) {
    let setup = setup();
    let (model, runs) = (&setup.model, &Cell::new(0));
    let options = || BlockOptions::new("tick").buffers(true);
    let rollout = Rollout::new(&setup.vs);
    let first = tick(&rollout, model, &x()).unwrap();
    let h = rollout.block_with(options(), &[("h", &first)], move |rollout, i| {
        let h = rollout.block_with(options(), &[("h", &model.tick(&i[0]))], move |_, i| {
            runs.set(runs.get() + 1);
            if fail && runs.get() == 3 { Err("as asked") } else { Ok(model.tick(&i[0])) }
        })?;
        Ok::<_, ReplayError>(model.tick(&h))
    });
    let last = tick(&rollout, model, &h.unwrap()).unwrap();
    let outcome = rollout.backward(&last.sum(Kind::Float));
    assert_eq!((outcome.is_err(), runs.get()), (fail, 3), "{outcome:?}");
    (model.weight.grad(), model.time.double_value(&[]))
}

#[test]
fn a_block_that_updates_around_one_that_updates_is_exact() {
    let setup = setup();
    let h = (0..5).fold(x(), |h, _| setup.model.tick(&h));
    h.sum(Kind::Float).backward();
    let (grad, time) = nested(false);
    assert!(same_bits(&setup.model.weight.grad(), &grad), "{grad}");
    assert!((time - 6.0).abs() < 1e-9);
}

#[test]
fn a_failure_of_an_inner_replay_brings_the_present_values_back() {
    let (grad, time) = nested(true);
    assert!(!grad.defined() && (time - 6.0).abs() < 1e-9, "{time}");
}

/// Also where the buffer that the block may update comes first.
#[test]
fn a_weight_that_is_written_beside_a_buffer_is_an_error() {
    let setup = setup();
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block_with(BlockOptions::new("writes").buffers(true), &[("x", &x())], |_, i| {
        let y = model.tick(&i[0]);
        tch::no_grad(|| drop(model.weight.shallow_clone().g_mul_scalar_(0.5)));
        y
    });
    let error = y.unwrap_err();
    assert!(matches!(&error, ReplayError::VariableWritten { variable, .. } if variable == "weight"), "{error}");
    assert!((model.time.double_value(&[]) - 1.0).abs() < 1e-9, "the buffer was not put back");
}

/// A buffer that requires grad by the user's own doing is a buffer all the same, and has a gradient.
#[test]
fn a_buffer_that_requires_grad_may_be_updated() {
    let run = |replay: bool| {
        let setup = setup();
        let model = &setup.model;
        let _ = model.time.set_requires_grad(true);
        let rollout = Rollout::new(&setup.vs);
        let tick = |h: &Tensor| {
            let body = |x: &Tensor| {
                let y = x * &model.weight * model.time.copy();
                tch::no_grad(|| drop(model.time.shallow_clone().g_add_scalar_(1.0)));
                y
            };
            if replay {
                rollout.block_with(BlockOptions::new("tick").buffers(true), &[("h", h)], move |_, i| body(&i[0]))
            } else {
                Ok(body(h))
            }
        };
        let loss = tick(&tick(&x()).unwrap()).unwrap().sum(Kind::Float);
        if replay {
            rollout.backward(&loss).unwrap();
        } else {
            loss.backward();
        }
        assert!((model.time.double_value(&[]) - 3.0).abs() < 1e-9);
        (model.weight.grad(), model.time.grad())
    };
    let (expected, found) = (run(false), run(true));
    assert!(same_bits(&expected.0, &found.0) && same_bits(&expected.1, &found.1));
}

/// What is put back is the variable's own, and later blocks may update it.
#[test]
fn a_buffer_that_was_resized_goes_on_as_before() {
    let setup = setup();
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let refused = rollout.block_with(BlockOptions::new("resizes").buffers(true), &[("x", &x())], |_, i| {
        let _ = model.time.shallow_clone().resize_([3]);
        &i[0] * &model.weight
    });
    assert!(matches!(refused, Err(ReplayError::VariableWritten { .. })), "{refused:?}");
    let last = (0..3).fold(x(), |h, _| tick(&rollout, model, &h).unwrap());
    rollout.backward(&last.sum(Kind::Float)).unwrap();
    assert!((model.time.double_value(&[]) - 4.0).abs() < 1e-9);

    let plain = self::setup();
    let last = (0..3).fold(x(), |h, _| plain.model.tick(&h));
    last.sum(Kind::Float).backward();
    assert!(same_bits(&plain.model.weight.grad(), &model.weight.grad()));
}

/// A weight that is frozen is no buffer: nobody may write it, whatever the block is marked as.
#[test]
fn a_frozen_weight_is_no_buffer() {
    let mut setup = setup();
    setup.vs.freeze();
    let model = &setup.model;
    let leaf = x().set_requires_grad(true);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block_with(BlockOptions::new("writes").buffers(true), &[("x", &leaf)], |_, i| {
        let y = &i[0] * model.weight.copy();
        let _ = model.weight.shallow_clone().g_mul_scalar_(0.5);
        y
    });
    let error = y.unwrap_err();
    assert!(matches!(&error, ReplayError::VariableWritten { variable, .. } if variable == "weight"), "{error}");
}

/// Resident memory of this process in MiB.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
    let pages: i64 = statm.split_whitespace().nth(1).expect("the second field").parse().expect("a number");
    pages * 4 / 1024
}

/// Blocks share the copies of buffers that did not change between them: of 16 MiB here, which a copy for each of thirty
/// blocks would make 480.
#[test]
fn what_does_not_change_is_copied_once() {
    let setup = Setup::new(|path| {
        let large = path.ones_no_train("large", &[4 << 20]);
        (Clock { weight: path.randn_standard("weight", &[4]), time: path.ones_no_train("time", &[1]) }, large)
    });
    let (model, large) = &setup.model;
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let mut h = x();
    for _ in 0..30 {
        h = rollout
            .block_with(BlockOptions::new("tick").buffers(true), &[("h", &h)], |_, i| model.tick(&i[0]) * large.get(3))
            .unwrap();
    }
    let grown = resident() - before;
    assert!(grown < 100, "grew by {grown} MiB");
    rollout.backward(&h.sum(Kind::Float)).unwrap();
    assert!((model.time.double_value(&[]) - 31.0).abs() < 1e-9);
}
