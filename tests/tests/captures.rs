//! Guarantee *captures*: a trainable tensor that a block uses without the store's knowledge gets its gradient and is
//! watched and restored like a variable. A tensor with a history from outside the block is an error in the forward.

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{How, Oracle, Setup, assert_exact, bytes, randn};
use tch::{Device, Kind, Tensor, nn, nn::Module};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn weight() -> Tensor {
    randn(3, &[6], Kind::Float).set_requires_grad(true)
}

fn with_weight() -> Setup<nn::Linear> {
    Setup::new(linear).leaf("w", weight())
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

fn scale<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, w: &Tensor, h: &Tensor) -> Tensor {
    let w = w.shallow_clone();
    how.block("scale", &[("h", h)], move |i| (model.forward(&i[0]) * &w).tanh())
}

/// Used once in each block: plain autograd's bits.
#[test]
fn an_unknown_parameter_gets_its_gradient() {
    assert_exact(Oracle::Plain, with_weight, |how, model, leaves| {
        let mut h = x();
        for _ in 0..4 {
            h = scale(how, model, &leaves[0].1, &h);
        }
        h.square().sum(Kind::Float)
    });
}

/// In a block inside a block it is no different: plain autograd's bits.
#[test]
fn an_unknown_parameter_of_an_inner_block_gets_its_gradient() {
    let w = weight();
    let plain = {
        (x() * &w).tanh().sum(Kind::Float).backward();
        bytes(&w.grad())
    };
    let w = weight();
    let vs = nn::VarStore::new(Device::Cpu);
    let rollout = Rollout::new(&vs);
    let loss = nested(&rollout, &w).unwrap();
    rollout.backward(&loss).unwrap();
    assert_eq!(plain, bytes(&w.grad()));
}

/// An outer block whose inner block captures `w`, reduced to a loss.
fn nested(rollout: &Rollout<'_>, w: &Tensor) -> Result<Tensor, ReplayError> {
    let w = w.shallow_clone();
    let h = rollout.block("outer", &[("x", &x())], move |rollout, i| {
        let w = w.shallow_clone();
        rollout.block("inner", &[("x", &i[0])], move |_, i| (&i[0] * &w).tanh())
    })?;
    Ok(h.sum(Kind::Float))
}

#[test]
fn its_old_gradient_is_added_to() {
    let setup = with_weight();
    let w = &setup.leaves[0].1;
    (w * 2.0).sum(Kind::Float).backward();
    let rollout = Rollout::new(&setup.vs);
    let loss = scale(&How::Replay(&rollout), &setup.model, w, &x()).sum(Kind::Float);
    rollout.backward(&loss).unwrap();

    let plain = weight();
    (&plain * 2.0).sum(Kind::Float).backward();
    (setup.model.forward(&x()) * &plain).tanh().sum(Kind::Float).backward();
    assert_eq!(bytes(&plain.grad()), bytes(&w.grad()));
}

/// `scale`, whose replay fails after a later block's replay has put a gradient into `w`.
fn failing<'m>(rollout: &Rollout<'m>, model: &'m nn::Linear, w: &Tensor) -> Tensor {
    let h = rollout
        .block("fails", &[("x", &x())], |_, i| if is_replaying() { Err("not again") } else { Ok(model.forward(&i[0])) })
        .unwrap();
    scale(&How::Replay(rollout), model, w, &h).sum(Kind::Float)
}

#[test]
fn its_old_gradient_is_restored_on_failure() {
    let setup = with_weight();
    let w = &setup.leaves[0].1;
    let rollout = Rollout::new(&setup.vs);
    let loss = failing(&rollout, &setup.model, w);
    rollout.backward(&loss).unwrap_err();
    assert!(!w.grad().defined());

    (w * 2.0).sum(Kind::Float).backward();
    let before = bytes(&w.grad());
    let rollout = Rollout::new(&setup.vs);
    let loss = failing(&rollout, &setup.model, w);
    rollout.backward(&loss).unwrap_err();
    assert_eq!(before, bytes(&w.grad()));
}

fn assert_changed(error: &ReplayError, in_block: &str) {
    let ReplayError::VariableChanged { block, variable, what } = error else { panic!("{error}") };
    assert_eq!((block.as_str(), *what), (in_block, "values"));
    assert!(variable.contains("[6]"), "{variable}");
}

#[test]
fn a_change_before_the_replay_is_an_error() {
    let setup = with_weight();
    let mut w = setup.leaves[0].1.shallow_clone();
    let rollout = Rollout::new(&setup.vs);
    let loss = scale(&How::Replay(&rollout), &setup.model, &w, &x()).sum(Kind::Float);
    let _ = tch::no_grad(|| w.g_add_scalar_(1.0));
    assert_changed(&rollout.backward(&loss).unwrap_err(), "scale");
    assert!(!w.grad().defined());
}

#[test]
fn a_change_of_what_an_inner_block_captured_is_an_error() {
    let mut w = weight();
    let vs = nn::VarStore::new(Device::Cpu);
    let rollout = Rollout::new(&vs);
    let loss = nested(&rollout, &w).unwrap();
    let _ = tch::no_grad(|| w.g_add_scalar_(1.0));
    assert_changed(&rollout.backward(&loss).unwrap_err(), "outer");
    assert!(!w.grad().defined());
}

/// The captured operation that the forward names.
fn captured(result: Result<Tensor, ReplayError>) -> String {
    match result {
        Err(ReplayError::Captured { block, operation }) => {
            assert_eq!(block, "uses");
            operation
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tensor_with_history_is_an_error_in_the_forward() {
    let setup = with_weight();
    let w = setup.leaves[0].1.exp();
    let rollout = Rollout::new(&setup.vs);
    let result = rollout.block("uses", &[("x", &x())], move |_, i| &i[0] * &w);
    assert_eq!(captured(result), "ExpBackward0");
}

#[test]
fn so_is_the_output_of_another_block() {
    let setup = with_weight();
    let rollout = Rollout::new(&setup.vs);
    let h = scale(&How::Replay(&rollout), &setup.model, &setup.leaves[0].1, &x());
    let result = rollout.block("uses", &[("x", &x())], move |_, i| &i[0] + &h);
    assert_eq!(captured(result), "ReplayBlock(scale)");
}

#[test]
fn and_a_tensor_of_the_outer_block_in_an_inner_one() {
    let setup = with_weight();
    let w = setup.leaves[0].1.shallow_clone();
    let rollout = Rollout::new(&setup.vs);
    let result = rollout.block("outer", &[("x", &x())], move |rollout, i| {
        let h = w.sin();
        rollout.block("uses", &[("x", &i[0])], move |_, i| &i[0] * &h)
    });
    let Err(ReplayError::Block { source, .. }) = result else { panic!("{result:?}") };
    let inner = source.downcast::<ReplayError>().unwrap();
    assert_eq!(captured(Err(*inner)), "SinBackward0");
}

/// As an input its gradient goes on its way: plain autograd's bits.
#[test]
fn as_an_input_it_is_right() {
    assert_exact(Oracle::Plain, with_weight, |how, model, leaves| {
        let w = leaves[0].1.exp();
        let h = how.block("scale", &[("x", &x()), ("w", &w)], |i| (model.forward(&i[0]) * &i[1]).tanh());
        h.sum(Kind::Float)
    });
}

/// The body's own leaf ends where it began; the others have one path: plain autograd's bits.
#[test]
fn a_leaf_made_inside_the_body_is_fine() {
    assert_exact(Oracle::Plain, with_weight, |how, model, leaves| {
        let w = leaves[0].1.shallow_clone();
        let h = how.block("own", &[("x", &x())], move |i| {
            let own = Tensor::ones([6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            model.forward(&i[0]) * &w * own
        });
        h.sum(Kind::Float)
    });
}

/// A penalty on the input's gradient, taken inside the body. Its second-order terms add up inside the block:
/// blockwise bits.
#[test]
fn a_gradient_inside_the_body() {
    let setup = || with_weight().leaf("x", x().set_requires_grad(true));
    assert_exact(Oracle::Blockwise, setup, |how, model, leaves| {
        let (w, x) = (leaves[0].1.shallow_clone(), &leaves[1].1);
        let h = how.block("penalty", &[("x", x)], move |i| {
            let y = (model.forward(&i[0]) * &w).tanh();
            let slope = Tensor::run_backward(&[y.sum(Kind::Float)], &[&i[0]], true, true).remove(0);
            y + slope.square()
        });
        h.sum(Kind::Float)
    });
}

/// What one store does not know, another may: then it has a name.
#[test]
fn a_second_store_knows_its_variables_by_name() {
    let setup = with_weight();
    let other = nn::VarStore::new(Device::Cpu);
    let mut w = other.root().var_copy("gain", &weight());
    let rollout = Rollout::builder(&setup.vs).store(&other).build();
    let loss = scale(&How::Replay(&rollout), &setup.model, &w, &x()).sum(Kind::Float);
    let _ = tch::no_grad(|| w.g_add_scalar_(1.0));
    let error = rollout.backward(&loss).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { variable, .. } if variable == "gain"), "{error}");
}

/// Nodes are numbered per thread from 0, and the first one is as much a block's own as any other.
#[test]
fn the_first_node_of_a_thread_is_the_blocks_own() {
    let trained = std::thread::spawn(|| {
        let w = Tensor::ones([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let vs = nn::VarStore::new(Device::Cpu);
        let rollout = Rollout::new(&vs);
        let x = Tensor::ones([3], (Kind::Float, Device::Cpu));
        let y = rollout.block("first", &[("x", &x)], |_, i| &i[0] * &w).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        w.grad().defined()
    });
    assert!(trained.join().unwrap());
}

/// Nothing knows of the tensor before the forward has run, so its first change is unseen; the second is not.
#[test]
fn a_captured_leaf_that_the_block_writes_is_an_error() {
    let w = weight();
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("writes", &[("x", &x())], |_, i| {
            let y = &i[0] * &w;
            let _ = tch::no_grad(|| w.shallow_clone().g_add_scalar_(1.0));
            y.detach() * &w
        })
        .unwrap();
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableWritten { block, .. } if block == "writes"), "{error}");
    assert!(!w.grad().defined());
}

/// What is computed from an input and leaves the body by the way carries no gradient past the block.
#[test]
fn a_tensor_that_leaves_the_body_by_the_way_is_an_error_in_the_loss() {
    let setup = with_leaf();
    let aside = std::cell::RefCell::new(None);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("leaks", &[("x", &setup.leaves[0].1)], |_, i| {
            let h = setup.model.forward(&i[0]).tanh();
            aside.replace(Some(h.square().sum(Kind::Float)));
            h
        })
        .unwrap();
    let loss = y.sum(Kind::Float) + aside.take().unwrap();
    let error = rollout.backward(&loss).unwrap_err();
    assert!(matches!(&error, ReplayError::Escaped { input, .. } if input == "x"), "{error}");
    assert!(!setup.model.ws.grad().defined());
}

#[test]
fn a_detached_tensor_may_leave_the_body() {
    let setup = with_leaf();
    let aside = std::cell::RefCell::new(None);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("logs", &[("x", &setup.leaves[0].1)], |_, i| {
            let h = setup.model.forward(&i[0]).tanh();
            aside.replace(Some(h.detach().abs().mean(Kind::Float)));
            h
        })
        .unwrap();
    let scale = aside.take().unwrap();
    rollout.backward(&(y / scale).sum(Kind::Float)).unwrap();
}

#[test]
fn an_inner_output_that_leaves_the_outer_body_by_the_way_is_an_error() {
    let setup = with_leaf();
    let model = &setup.model;
    let aside = std::cell::RefCell::new(None);
    let rollout = Rollout::new(&setup.vs);
    let _y = rollout
        .block("outer", &[("x", &setup.leaves[0].1)], |rollout, i| {
            let h = rollout.block("inner", &[("x", &i[0])], |_, i| model.forward(&i[0])).unwrap();
            aside.replace(Some(h.shallow_clone()));
            h.tanh()
        })
        .unwrap();
    let error = rollout.backward(&aside.take().unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::Escaped { .. } | ReplayError::ForeignBackward { .. }), "{error}");
    assert!(!setup.model.ws.grad().defined());
}

/// A captured leaf that reaches an inner block as an input is the outer block's all the same.
#[test]
fn a_captured_leaf_handed_to_an_inner_block_is_watched() {
    let w = weight();
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout
        .block("outer", &[("x", &x())], |rollout, i| {
            rollout.block("inner", &[("x", &i[0]), ("w", &w)], |_, i| &i[0] * &i[1]).unwrap()
        })
        .unwrap();
    let _ = tch::no_grad(|| w.shallow_clone().g_add_scalar_(1.0));
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::VariableChanged { .. }), "{error}");
}

fn with_leaf() -> Setup<nn::Linear> {
    Setup::new(linear).leaf("x", x().set_requires_grad(true))
}

/// A captured tensor that was replaced would let the replay run on another one.
#[test]
fn a_captured_leaf_that_is_gone_is_an_error() {
    let held = std::cell::RefCell::new(weight());
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("swaps", &[("x", &x())], |_, i| &i[0] * &*held.borrow()).unwrap();
    drop(held.replace(weight()));
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::VariableChanged { .. }), "{error}");
}
