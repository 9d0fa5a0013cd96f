//! Guarantee *once*: `Rollout::backward` is the only way through a block and consumes its rollout. A plain
//! `loss.backward()`, a second pass, double backward and backward after the rollout is gone are clear errors.

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{How, Oracle, Outcome, Setup, assert_exact, assert_same, randn, replayed, same_bits};
use tch::nn::Module;
use tch::{Kind, TchError, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn chain<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, _: &[(String, Tensor)]) -> Tensor {
    let mut state = randn(1, &[5, 6], Kind::Float);
    for _ in 0..3 {
        state = how.block("step", &[("state", &state)], |i| model.forward(&i[0]).tanh());
    }
    state.square().mean(Kind::Float)
}

fn assert_untrained<M>(setup: &Setup<M>) {
    assert!(setup.grads().values().all(Option::is_none));
}

/// The error says which block was reached and what to call instead.
#[track_caller]
fn assert_foreign(error: &TchError) {
    let text = error.to_string();
    for part in ["`step`", "Rollout::backward", "rollout.backward(&loss)", "loss.backward()"] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

#[test]
fn a_plain_backward_is_an_error_and_not_silence() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
    assert_foreign(&loss.f_backward().unwrap_err());
    assert_untrained(&setup);
}

#[test]
fn a_plain_backward_panics_as_other_failures_of_tch_do() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| loss.backward())).unwrap_err();
    assert!(payload.downcast_ref::<String>().unwrap().contains("Rollout::backward"));
}

/// The plain backward freed what the graph around the blocks had saved.
#[test]
fn the_rollout_cannot_make_up_for_a_plain_backward() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
    loss.f_backward().unwrap_err();
    let error = rollout.backward(&loss).unwrap_err();
    assert!(matches!(error, ReplayError::Backward { .. }), "{error:?}");
    assert!(error.to_string().contains("second time"), "{error}");
    assert_untrained(&setup);
    replayed(&setup, chain);
    assert!(setup.model.ws.grad().defined());
}

/// Where the graph around the blocks is kept or needs nothing of its own, a refused attempt costs nothing.
#[test]
fn a_refused_attempt_leaves_the_blocks_intact() {
    let expected = replayed(&with_leaf(), chain_of_leaf);
    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    let loss = chain_of_leaf(&How::Replay(&rollout), &setup.model, &setup.leaves);
    assert_foreign(&Tensor::f_run_backward(&[&loss], &[&setup.leaves[0].1], true, false).unwrap_err());
    assert_foreign(&loss.f_backward().unwrap_err());
    rollout.backward(&loss).unwrap();
    assert_same(&expected, &Outcome { loss: loss.detach(), grads: setup.grads() });
}

fn with_leaf() -> Setup<nn::Linear> {
    Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

fn chain_of_leaf<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, leaves: &[(String, Tensor)]) -> Tensor {
    let h = how.block("step", &[("x", &leaves[0].1)], |i| model.forward(&i[0]).tanh());
    how.block("step", &[("h", &h)], |i| model.forward(&i[0]).sin()).sum(Kind::Float)
}

#[test]
fn double_backward_is_an_error() {
    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    let loss = chain_of_leaf(&How::Replay(&rollout), &setup.model, &setup.leaves);
    for create_graph in [false, true] {
        let grads = Tensor::f_run_backward(&[&loss], &[&setup.leaves[0].1], true, create_graph);
        assert_foreign(&grads.unwrap_err());
    }
    assert_untrained(&setup);
}

/// No edge of the node leads to a parameter, so LibTorch does not look for one behind it: no gradient, not a wrong one.
#[test]
fn a_gradient_asked_for_a_parameter_alone_is_undefined() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
    let grads = Tensor::f_run_backward(&[&loss], &[&setup.model.ws], true, false).unwrap();
    assert!(!grads[0].defined());
}

/// Of several, those that the refused pass would have come to before are left without a gradient too.
#[test]
fn gradients_asked_for_several_tensors_are_an_error_and_none_is_left() {
    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    let (model, x) = (&setup.model, &setup.leaves[0].1);
    let own = randn(3, &[6], Kind::Float).set_requires_grad(true);
    let loss = chain_of_leaf(&How::Replay(&rollout), model, &setup.leaves) * (&own * &model.ws).sum(Kind::Float);
    for wanted in [vec![&own, x], vec![x, &model.ws], vec![&model.ws, &own, x]] {
        assert_foreign(&Tensor::f_run_backward(&[&loss], &wanted, true, false).unwrap_err());
        assert!(!own.grad().defined());
        assert_untrained(&setup);
    }
}

#[test]
fn a_plain_backward_on_another_thread_is_an_error() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
    let theirs = loss.shallow_clone();
    let outcome = std::thread::spawn(move || theirs.f_backward()).join().unwrap();
    assert_foreign(&outcome.unwrap_err());
}

#[test]
fn a_loss_outlives_its_rollout_but_not_its_gradient() {
    let setup = Setup::new(linear);
    let loss = {
        let rollout = Rollout::new(&setup.vs);
        chain(&How::Replay(&rollout), &setup.model, &[])
    };
    assert!(loss.double_value(&[]).is_finite());
    assert_foreign(&loss.f_backward().unwrap_err());
    assert_untrained(&setup);
}

#[test]
fn a_loss_outlives_its_model() {
    let loss = {
        let setup = Setup::new(linear);
        let rollout = Rollout::new(&setup.vs);
        chain(&How::Replay(&rollout), &setup.model, &[])
    };
    assert_foreign(&loss.f_backward().unwrap_err());
}

#[track_caller]
fn assert_other_rollout(error: &ReplayError) {
    assert!(matches!(error, ReplayError::OtherRollout { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("`step`") && text.contains("another rollout"), "{text}");
}

#[test]
fn a_rollout_that_is_gone_cannot_be_differentiated_by_another_one() {
    let setup = Setup::new(linear);
    let loss = {
        let rollout = Rollout::new(&setup.vs);
        chain(&How::Replay(&rollout), &setup.model, &[])
    };
    assert_other_rollout(&Rollout::new(&setup.vs).backward(&loss).unwrap_err());
    assert_untrained(&setup);
}

#[test]
fn a_block_of_another_rollout_in_the_loss_is_an_error() {
    let setup = Setup::new(linear);
    let (ours, theirs) = (Rollout::new(&setup.vs), Rollout::new(&setup.vs));
    let our_loss = chain(&How::Replay(&ours), &setup.model, &[]);
    let their_loss = chain(&How::Replay(&theirs), &setup.model, &[]);
    let sum = our_loss + &their_loss;
    assert_other_rollout(&ours.backward(&sum).unwrap_err());
    assert_untrained(&setup);
}

#[test]
fn an_output_of_another_rollout_as_an_input_is_an_error() {
    let setup = Setup::new(linear);
    let (first, second) = (Rollout::new(&setup.vs), Rollout::new(&setup.vs));
    let h = chain(&How::Replay(&first), &setup.model, &[]);
    let y = second.block("own", &[("h", &h)], |_, i| i[0].exp() * setup.model.ws.sum(Kind::Float)).unwrap();
    assert_other_rollout(&second.backward(&y).unwrap_err());
    assert_untrained(&setup);
}

/// The way to cut a long rollout into pieces: detach between them. Each piece adds its gradient, as in plain
/// autograd, which is the oracle: each weight is used once in each block.
#[test]
fn pieces_with_a_detach_between_them_accumulate() {
    let plain = Setup::new(linear);
    let setup = Setup::new(linear);
    let piece = |how: &How<'_, '_>, model: &Tensor, start: &Tensor| {
        let w = model.shallow_clone();
        how.block("step", &[("start", start), ("w", model)], move |i| i[0].matmul(&i[1]).tanh() + w.sum(Kind::Float))
    };
    let (mut h, mut g) = (randn(1, &[5, 6], Kind::Float), randn(1, &[5, 6], Kind::Float));
    for _ in 0..3 {
        h = piece(&How::Plain, &plain.model.ws, &h.detach());
        h.sum(Kind::Float).backward();
        let rollout = Rollout::new(&setup.vs);
        g = piece(&How::Replay(&rollout), &setup.model.ws, &g.detach());
        rollout.backward(&g.sum(Kind::Float)).unwrap();
    }
    let outcome = |last: &Tensor, setup: &Setup<_>| Outcome { loss: last.detach(), grads: setup.grads() };
    assert_same(&outcome(&h, &plain), &outcome(&g, &setup));
}

#[test]
fn a_second_loss_of_a_rollout_that_was_differentiated_is_an_error() {
    let setup = Setup::new(linear);
    let rollout = Rollout::new(&setup.vs);
    let x = randn(2, &[5, 6], Kind::Float);
    let h = rollout.block("step", &[("x", &x)], |_, i| setup.model.forward(&i[0]).mean(Kind::Float)).unwrap();
    let (first, second, third) = (h.exp(), h.sin(), h.cos());
    rollout.backward(&first).unwrap();
    let once = setup.model.ws.grad().copy();
    assert_foreign(&second.f_backward().unwrap_err());
    assert_other_rollout(&Rollout::new(&setup.vs).backward(&third).unwrap_err());
    assert!(same_bits(&once, &setup.model.ws.grad()));
}

/// A force from an energy, inside a block: the inner gradient is an ordinary operation. The weight is used once.
#[test]
fn a_gradient_taken_inside_a_body_is_allowed() {
    let setup = || Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true));
    assert_exact(Oracle::Plain, setup, |how, model, leaves| {
        how.block("force", &[("x", &leaves[0].1)], |i| {
            let energy = model.forward(&i[0]).tanh().sum(Kind::Float);
            Tensor::run_backward(&[energy], &[&i[0]], true, true).remove(0)
        })
        .square()
        .sum(Kind::Float)
    });
}

/// A body that differentiates the rollout it belongs to, in the forward or while it is being differentiated.
#[test]
fn a_body_cannot_differentiate_its_own_rollout() {
    for in_replay in [false, true] {
        let setup = Setup::new(linear);
        let rollout = Rollout::new(&setup.vs);
        let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
        let theirs = loss.shallow_clone();
        let y = rollout.block("greedy", &[("x", &loss)], move |_, i| {
            if is_replaying() == in_replay {
                Tensor::f_run_backward(&[&theirs], &[&theirs], true, false)?;
                theirs.f_backward()?;
            }
            Ok::<_, TchError>(i[0].exp())
        });
        let error = y.and_then(|y| rollout.backward(&y)).unwrap_err();
        let ReplayError::Block { block, source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(block, "greedy");
        assert_foreign(source.downcast_ref().unwrap());
        assert_untrained(&setup);
    }
}

#[test]
fn what_is_no_loss_is_an_error() {
    let setup = Setup::new(linear);
    let backward = |loss: &Tensor| Rollout::new(&setup.vs).backward(loss).unwrap_err();
    let vector = setup.model.bs.as_ref().unwrap();
    assert!(matches!(backward(vector), ReplayError::LossNotScalar { shape } if shape == [6]));
    assert!(matches!(backward(&vector.narrow(0, 0, 0)), ReplayError::LossNotScalar { shape } if shape == [0]));
    assert!(matches!(backward(&Tensor::new()), ReplayError::LossNotScalar { .. }));
    assert!(matches!(backward(&vector.detach().sum(Kind::Float)), ReplayError::LossWithoutGrad));
    let loss = vector.sum(Kind::Float);
    assert!(matches!(Rollout::inference().backward(&loss).unwrap_err(), ReplayError::Inference));
    assert_untrained(&setup);
}

#[test]
fn a_complex_loss_is_an_error() {
    let setup = Setup::new(linear);
    let w = Tensor::ones([], (Kind::ComplexFloat, tch::Device::Cpu)).set_requires_grad(true);
    let error = Rollout::new(&setup.vs).backward(&(&w * &w)).unwrap_err();
    assert!(matches!(error, ReplayError::LossNotReal { .. }), "{error}");
    assert!(!w.grad().defined());
}

/// What an inner block returns in the forward of an outer one has no gradient to give, and says so.
#[test]
fn a_plain_backward_of_an_inner_output_in_the_outer_forward_is_an_error() {
    let setup = Setup::new(linear);
    let model = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let x = Tensor::ones([2, 6], (Kind::Float, tch::Device::Cpu));
    let refused = rollout.block("outer", &[("x", &x)], |rollout, i| {
        let h = rollout.block("inner", &[("x", &i[0])], |_, i| model.forward(&i[0])).unwrap();
        h.sum(Kind::Float).f_backward()?;
        Ok::<_, TchError>(h)
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("Rollout::backward"), "{error}");
    assert_untrained(&setup);
}
