//! Guarantee *outputs*: a block may return a view, an input, a parameter or one tensor twice. Gradients are right, the
//! model's own tensors stay leaves, and an in-place operation whose gradient would be wrong is an error at once.

use replay_runtime::Rollout;
use replay_tests::{How, Oracle, Setup, assert_exact, bytes, randn};
use tch::{Kind, Tensor, nn, nn::Module};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn with_leaf() -> Setup<nn::Linear> {
    Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

/// A block that returns `alias` of its input, its leaf and its model beside a plain output, and a loss of both.
fn beside<'m>(
    how: &How<'_, 'm>,
    model: &'m nn::Linear,
    x: &Tensor,
    alias: impl Fn(&nn::Linear, &Tensor) -> Tensor + 'm,
) -> Tensor {
    let (alias, y) = how.block("beside", &[("x", x)], move |i| (alias(model, &i[0]), model.forward(&i[0]).tanh()));
    alias.square().sum(Kind::Float) + y.sum(Kind::Float)
}

/// Two contributions meet, and a sum of two has one order: plain autograd's bits.
#[test]
fn a_view_of_an_input() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        beside(how, model, &leaves[0].1, |_, x| x.view([6, 5]).narrow(0, 1, 3))
    });
}

/// As above: two contributions.
#[test]
fn an_input_itself() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        beside(how, model, &leaves[0].1, |_, x| x.shallow_clone())
    });
}

/// A parameter as output adds a second contribution to it: plain autograd's bits.
#[test]
fn a_parameter_itself_or_a_view_of_it() {
    for view in [false, true] {
        assert_exact(Oracle::Plain, with_leaf, move |how, model, leaves| {
            beside(
                how,
                model,
                &leaves[0].1,
                move |model, _| if view { model.ws.tr() } else { model.ws.shallow_clone() },
            )
        });
    }
}

#[test]
fn a_returned_parameter_stays_a_leaf_without_history() {
    let setup = with_leaf();
    let (model, x) = (&setup.model, &setup.leaves[0].1);
    let before = bytes(&model.ws);
    let rollout = Rollout::new(&setup.vs);
    let weight = rollout.block("weight", &[("x", x)], move |_, _| model.ws.shallow_clone()).unwrap();
    assert!(weight.requires_grad() && !weight.is_leaf());
    assert!(model.ws.is_leaf() && model.ws.requires_grad());

    rollout.backward(&weight.sum(Kind::Float)).unwrap();
    assert_eq!(bytes(&model.ws.grad()), bytes(&model.ws.ones_like()));
    assert!(!x.grad().defined());
    assert_eq!(before, bytes(&model.ws));
}

/// Each output's own uses are summed before the block, and both sums meet inside: blockwise bits.
#[test]
fn one_tensor_twice() {
    assert_exact(Oracle::Blockwise, with_leaf, |how, model, leaves| {
        let (a, b) = how.block("twice", &[("x", &leaves[0].1)], |i| {
            let h = model.forward(&i[0]).tanh();
            (h.shallow_clone(), h)
        });
        a.exp().sum(Kind::Float) + b.square().sum(Kind::Float)
    });
}

/// Chunks do not overlap, so nothing is added that plain autograd would add in another order.
#[test]
fn two_outputs_that_share_storage() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let (a, b) = how.block("chunks", &[("x", &leaves[0].1)], |i| {
            let mut halves = model.forward(&i[0]).tanh().chunk(2, 1);
            (halves.remove(0), halves.remove(0))
        });
        a.exp().sum(Kind::Float) + b.square().sum(Kind::Float)
    });
}

/// One path to each leaf: plain autograd's bits.
#[test]
fn a_detached_output_does_not_require_grad() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let (constant, h) = how.block("detached", &[("x", &leaves[0].1)], |i| {
            let h = model.forward(&i[0]).tanh();
            (h.detach(), h)
        });
        assert!(!constant.requires_grad() && h.requires_grad());
        (constant * h).sum(Kind::Float)
    });
}

/// One path to each leaf through each output's own elements: plain autograd's bits.
#[test]
fn integer_bool_empty_scalar_and_expanded_outputs() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let (index, mask, empty, h) = how.block("kinds", &[("x", &leaves[0].1)], |i| {
            let h = model.forward(&i[0]).tanh();
            (h.argmax(1, false), h.gt(0.0), h.narrow(0, 0, 0), h)
        });
        assert_eq!((index.kind(), mask.kind(), empty.size()), (Kind::Int64, Kind::Bool, vec![0, 6]));
        assert!(!index.requires_grad() && !mask.requires_grad() && empty.requires_grad());
        let (scalar, wide) = how.block("shapes", &[("h", &h)], |i| {
            (i[0].square().sum(Kind::Float), i[0].sin().mean(Kind::Float).expand([3, 4], false))
        });
        assert_eq!((scalar.size(), wide.size(), wide.stride()), (vec![], vec![3, 4], vec![0, 0]));
        scalar + wide.sum(Kind::Float) + empty.sum(Kind::Float)
    });
}

/// The caller's in-place operation is part of the graph around the block: plain autograd's bits.
#[test]
fn the_caller_may_change_a_fresh_output_in_place() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let mut h = how.block("fresh", &[("x", &leaves[0].1)], |i| model.forward(&i[0]).sin());
        let _ = h.g_mul_scalar_(3.0);
        let mut h = how.block("fresh", &[("h", &h)], |i| model.forward(&i[0]).sin());
        let _ = h.g_add_scalar_(1.0).exp_();
        h.sum(Kind::Float)
    });
}

/// What a block does with its own tensors before it returns them is its own business: plain autograd's bits.
#[test]
fn a_block_may_change_its_own_tensors_in_place() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let h = how.block("inside", &[("x", &leaves[0].1)], |i| model.forward(&i[0]).g_mul_scalar_(2.0).tanh_());
        h.sum(Kind::Float)
    });
}

/// An in-place operation on `output` is refused, and says that it is about views of a custom function.
fn assert_refused(mut output: Tensor) {
    assert!(output.requires_grad());
    let before = bytes(&output);
    let error = output.f_mul_(&Tensor::from(3f32)).expect_err("its gradient could not follow").to_string();
    assert!(error.contains("custom Function"), "{error}");
    assert_eq!(before, bytes(&output), "refused before it was done");
}

#[test]
fn an_aliased_output_refuses_changes_in_place() {
    let setup = with_leaf();
    let (model, x) = (&setup.model, setup.leaves[0].1.sin());
    let rollout = Rollout::new(&setup.vs);
    let inputs = [("x", &x)];
    let view = rollout.block("view", &inputs, |_, i| i[0].view([6, 5])).unwrap();
    let input = rollout.block("input", &inputs, |_, i| i[0].shallow_clone()).unwrap();
    let weight = rollout.block("weight", &inputs, |_, _| model.ws.shallow_clone()).unwrap();
    let row = rollout.block("row", &inputs, |_, _| model.ws.get(0)).unwrap();
    let captured = Tensor::ones([5, 6], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    let captured = rollout.block("captured", &inputs, move |_, _| captured.view([6, 5])).unwrap();
    let (a, b) = rollout
        .block("chunks", &inputs, |_, i| {
            let mut halves = i[0].exp().chunk(2, 1);
            (halves.remove(0), halves.remove(0))
        })
        .unwrap();
    let aliased = [view, input, weight, row, captured, a, b];
    let loss = aliased.iter().map(|t| t.sum(Kind::Float)).sum::<Tensor>();
    for output in aliased {
        assert_refused(output);
    }
    // A refused change leaves nothing behind.
    rollout.backward(&loss).unwrap();
    assert!(model.ws.grad().defined() && setup.leaves[0].1.grad().defined());
}

/// Behind autograd's back the change is possible, and then the replay notices it.
#[test]
fn a_change_of_an_aliased_output_without_grad_is_noticed() {
    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    let x = setup.leaves[0].1.sin();
    let mut view = rollout.block("view", &[("x", &x)], |_, i| i[0].view([6, 5])).unwrap();
    let loss = view.square().sum(Kind::Float);
    let _ = tch::no_grad(|| view.g_mul_scalar_(2.0));
    let loss = loss + x.sum(Kind::Float);
    assert!(rollout.backward(&loss).is_err());
    assert!(!setup.leaves[0].1.grad().defined());
}

/// No contribution comes twice: plain autograd's bits.
#[test]
fn an_alias_can_be_the_next_blocks_input() {
    assert_exact(Oracle::Plain, with_leaf, |how, model, leaves| {
        let x = leaves[0].1.sin();
        let h = how.block("view", &[("x", &x)], |i| i[0].view([6, 5]));
        let h = how.block("back", &[("h", &h)], |i| i[0].view([5, 6]));
        how.block("step", &[("h", &h)], |i| model.forward(&i[0])).square().sum(Kind::Float)
    });
}
