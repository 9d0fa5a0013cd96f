//! Guarantee *accumulation*: `backward` adds to whatever `.grad` held before, like plain autograd; `None` stays `None`
//! where no block reached a parameter; tied parameters count once.
//!
//! Plain autograd collects all contributions to a leaf before it adds their sum to `.grad`, and so does the rollout's
//! transaction. With each weight used once inside each block the oracle is therefore plain autograd, bit for bit,
//! old gradients included.

use replay_runtime::{ReplayError, Rollout};
use replay_tests::{How, Setup, randn, replayed, same_bits};
use tch::nn::{Module, OptimizerConfig};
use tch::{Kind, Tensor, nn};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn chain<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, _: &[(String, Tensor)]) -> Tensor {
    let mut state = randn(1, &[5, 6], Kind::Float);
    for _ in 0..4 {
        state = how.block("step", &[("state", &state)], |i| model.forward(&i[0]).tanh());
    }
    state.square().mean(Kind::Float)
}

/// Gives `leaf` a gradient by plain autograd.
fn give_grad(leaf: &Tensor, seed: i64) {
    (leaf * randn(seed, &leaf.size(), leaf.kind())).sum(leaf.kind()).backward();
}

fn with_old_grads() -> Setup<nn::Linear> {
    let setup = Setup::new(linear);
    give_grad(&setup.model.ws, 21);
    give_grad(setup.model.bs.as_ref().unwrap(), 22);
    setup
}

fn assert_equal_grads<M, N>(expected: &Setup<M>, found: &Setup<N>) {
    let found = found.grads();
    for (name, expected) in expected.grads() {
        match (expected, &found[&name]) {
            (None, None) => {}
            (Some(a), Some(b)) => assert!(same_bits(&a, b), "gradient of {name} differs"),
            (a, b) => panic!("gradient of {name}: expected {:?}, found {:?}", a.is_some(), b.is_some()),
        }
    }
}

#[test]
fn old_gradients_are_added_to_as_plain_autograd_does() {
    let plain = with_old_grads();
    chain(&How::Plain, &plain.model, &[]).backward();
    let setup = with_old_grads();
    replayed(&setup, chain);
    assert_equal_grads(&plain, &setup);
}

/// With and without the transaction, and whoever else looks at their storage.
#[test]
fn old_gradients_are_added_to_in_place() {
    for restore in [false, true] {
        let setup = with_old_grads();
        let handles = [setup.model.ws.grad(), setup.model.bs.as_ref().unwrap().grad()];
        let before = handles.each_ref().map(Tensor::copy);
        let views = handles.each_ref().map(|handle| handle.view(-1));
        let rollout = Rollout::builder(&setup.vs).restore_gradients(restore).build();
        let loss = chain(&How::Replay(&rollout), &setup.model, &[]);
        rollout.backward(&loss).unwrap();
        let now = [setup.model.ws.grad(), setup.model.bs.as_ref().unwrap().grad()];
        for (((handle, view), before), now) in handles.iter().zip(&views).zip(&before).zip(&now) {
            assert_eq!(handle.data_ptr(), now.data_ptr());
            assert!(same_bits(handle, now) && same_bits(view, &now.view(-1)));
            assert!(!same_bits(handle, before));
        }
    }
}

#[test]
fn several_backward_passes_accumulate() {
    let plain = Setup::new(linear);
    let setup = Setup::new(linear);
    for _ in 0..3 {
        chain(&How::Plain, &plain.model, &[]).backward();
        replayed(&setup, chain);
    }
    assert_equal_grads(&plain, &setup);
}

#[test]
fn plain_and_replayed_backward_passes_alternate() {
    let plain = Setup::new(linear);
    let setup = Setup::new(linear);
    for pass in 0..4 {
        chain(&How::Plain, &plain.model, &[]).backward();
        if pass % 2 == 0 {
            replayed(&setup, chain);
        } else {
            chain(&How::Plain, &setup.model, &[]).backward();
        }
    }
    assert_equal_grads(&plain, &setup);
}

#[test]
fn a_leaf_among_the_inputs_accumulates_too() {
    let build = || {
        let setup = Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true));
        give_grad(&setup.leaves[0].1, 23);
        setup
    };
    let plain = build();
    step_of_a_leaf(&How::Plain, &plain.model, &plain.leaves).backward();
    let setup = build();
    let handle = setup.leaves[0].1.grad();
    replayed(&setup, step_of_a_leaf);
    assert_equal_grads(&plain, &setup);
    assert!(same_bits(&handle, &setup.leaves[0].1.grad()));
}

fn step_of_a_leaf<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, leaves: &[(String, Tensor)]) -> Tensor {
    let x = &leaves[0].1;
    how.block("step", &[("x", x)], |i| model.forward(&i[0]).tanh()).sum(Kind::Float)
}

#[test]
fn what_no_block_reaches_stays_as_it_was() {
    let setup = Setup::new(|path| (linear(&(path / "used")), linear(&(path / "idle")), linear(&(path / "old"))));
    give_grad(&setup.model.2.ws, 24);
    let old = setup.model.2.ws.grad();
    let before = old.copy();
    replayed(&setup, |how, model, _| chain(how, &model.0, &[]));
    let grads = setup.grads();
    assert!(grads["used.weight"].is_some() && grads["used.bias"].is_some());
    assert!(grads["idle.weight"].is_none() && grads["idle.bias"].is_none());
    assert!(grads["old.bias"].is_none());
    let now = grads["old.weight"].as_ref().unwrap();
    assert_eq!(now.data_ptr(), old.data_ptr());
    assert!(same_bits(now, &before));
}

#[test]
fn a_parameter_whose_output_is_unused_stays_none() {
    let setup = Setup::new(|path| (linear(&(path / "used")), linear(&(path / "idle"))));
    replayed(&setup, |how, model, _| {
        let x = randn(2, &[5, 6], Kind::Float);
        let (a, _) = how.block("pair", &[("x", &x)], |i| (model.0.forward(&i[0]), model.1.forward(&i[0])));
        a.sum(Kind::Float)
    });
    assert!(setup.model.0.ws.grad().defined());
    assert!(!setup.model.1.ws.grad().defined());
}

/// One tensor under two names.
fn tied(path: &nn::Path<'_>) -> nn::Linear {
    let linear = linear(path);
    let _ = path.add("tied", linear.ws.shallow_clone(), true);
    linear
}

#[test]
fn a_tied_parameter_counts_once() {
    let plain = Setup::new(tied);
    let setup = Setup::new(tied);
    for setup in [&plain, &setup] {
        give_grad(&setup.model.ws, 25);
    }
    chain(&How::Plain, &plain.model, &[]).backward();
    replayed(&setup, chain);
    assert_equal_grads(&plain, &setup);
}

#[test]
fn a_tied_parameter_gets_its_gradient_back_after_a_failure() {
    let setup = Setup::new(tied);
    give_grad(&setup.model.ws, 25);
    let old = setup.model.ws.grad();
    let before = old.copy();
    let model = &setup.model;
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let h = rollout.block("first", &[("x", &x)], |_, i| fails_in_replay(model, i)).unwrap();
    let h = rollout.block("last", &[("h", &h)], |_, i| model.forward(&i[0])).unwrap();
    rollout.backward(&h.sum(Kind::Float)).unwrap_err();
    assert_eq!(model.ws.grad().data_ptr(), old.data_ptr());
    assert!(same_bits(&model.ws.grad(), &before));
}

fn fails_in_replay(model: &nn::Linear, inputs: &[Tensor]) -> Result<Tensor, &'static str> {
    if replay_runtime::is_replaying() { Err("no second time") } else { Ok(model.forward(&inputs[0]).tanh()) }
}

#[test]
fn several_stores_accumulate_through_one_rollout() {
    let build = || (Setup::new(linear), with_old_grads());
    let plain = build();
    adversarial(&How::Plain, &plain.0.model, &plain.1.model).backward();

    let (generator, critic) = build();
    let handle = critic.model.ws.grad();
    let rollout = Rollout::builder(&generator.vs).store(&critic.vs).build();
    let loss = adversarial(&How::Replay(&rollout), &generator.model, &critic.model);
    rollout.backward(&loss).unwrap();
    assert_equal_grads(&plain.0, &generator);
    assert_equal_grads(&plain.1, &critic);
    assert_eq!(handle.data_ptr(), critic.model.ws.grad().data_ptr());
}

fn adversarial<'m>(how: &How<'_, 'm>, generator: &'m nn::Linear, critic: &'m nn::Linear) -> Tensor {
    let x = randn(2, &[5, 6], Kind::Float);
    let made = how.block("generate", &[("x", &x)], |i| generator.forward(&i[0]).tanh());
    how.block("criticise", &[("made", &made)], |i| critic.forward(&i[0]).square()).mean(Kind::Float)
}

#[test]
fn a_frozen_teacher_gets_none() {
    let student = Setup::new(linear);
    let mut teacher = Setup::new(linear);
    teacher.vs.freeze();
    let rollout = Rollout::builder(&student.vs).store(&teacher.vs).build();
    let x = randn(2, &[5, 6], Kind::Float);
    let distance = rollout
        .block("distil", &[("x", &x)], |_, i| {
            (student.model.forward(&i[0]).sin() - teacher.model.forward(&i[0])).square()
        })
        .unwrap();
    rollout.backward(&distance.sum(Kind::Float)).unwrap();
    assert!(student.model.ws.grad().defined());
    assert!(teacher.grads().values().all(Option::is_none));
}

#[test]
fn sparse_gradients_accumulate() {
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let build = || Setup::new(|path| nn::embedding(path, 10, 4, config));
    for dense_first in [false, true] {
        let (plain, setup) = (build(), build());
        for setup in [&plain, &setup] {
            if dense_first {
                give_grad(&setup.model.ws, 26);
            }
        }
        for _ in 0..2 {
            embed(&How::Plain, &plain.model, &[]).backward();
            replayed(&setup, embed);
        }
        assert_eq!(plain.model.ws.grad().is_sparse(), setup.model.ws.grad().is_sparse());
        assert_equal_grads(&plain, &setup);
    }
}

fn embed<'m>(how: &How<'_, 'm>, model: &'m nn::Embedding, _: &[(String, Tensor)]) -> Tensor {
    let tokens = Tensor::from_slice(&[1i64, 3, 3, 9]);
    how.block("embed", &[("tokens", &tokens)], |i| model.forward(&i[0])).square().sum(Kind::Float)
}

#[test]
fn a_dense_gradient_joins_an_old_sparse_one() {
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let build = || {
        let setup = Setup::new(|path| nn::embedding(path, 10, 4, config));
        setup.model.forward(&Tensor::from_slice(&[2i64, 2])).sum(Kind::Float).backward();
        assert!(setup.model.ws.grad().is_sparse());
        setup
    };
    let plain = build();
    mix(&How::Plain, &plain.model, &[]).backward();
    let setup = build();
    replayed(&setup, mix);
    assert!(!setup.model.ws.grad().is_sparse());
    assert_equal_grads(&plain, &setup);
}

fn mix<'m>(how: &How<'_, 'm>, model: &'m nn::Embedding, _: &[(String, Tensor)]) -> Tensor {
    let x = randn(2, &[3, 10], Kind::Float);
    how.block("mix", &[("x", &x)], |i| i[0].matmul(&model.ws).tanh()).sum(Kind::Float)
}

/// One block reaches each parameter, so that the old gradient and the new one associate alike either way.
#[test]
fn without_the_transaction_new_gradients_are_added_at_once() {
    let plain = with_old_grads();
    one_block(&How::Plain, &plain.model).backward();
    let setup = with_old_grads();
    let handle = setup.model.ws.grad();
    let rollout = Rollout::builder(&setup.vs).restore_gradients(false).build();
    let loss = one_block(&How::Replay(&rollout), &setup.model);
    rollout.backward(&loss).unwrap();
    assert_equal_grads(&plain, &setup);
    assert_eq!(handle.data_ptr(), setup.model.ws.grad().data_ptr());
}

fn one_block<'m>(how: &How<'_, 'm>, model: &'m nn::Linear) -> Tensor {
    let x = randn(2, &[5, 6], Kind::Float);
    how.block("one", &[("x", &x)], |i| model.forward(&i[0]).tanh()).sum(Kind::Float)
}

#[test]
fn without_the_transaction_a_failure_leaves_the_sum_so_far() {
    let failed = |restore: bool| -> Result<(Tensor, Tensor), ReplayError> {
        let setup = with_old_grads();
        let before = setup.model.ws.grad().copy();
        let model = &setup.model;
        let x = randn(2, &[5, 6], Kind::Float);
        let rollout = Rollout::builder(&setup.vs).restore_gradients(restore).build();
        let h = rollout.block("first", &[("x", &x)], |_, i| fails_in_replay(model, i))?;
        let h = rollout.block("last", &[("h", &h)], |_, i| model.forward(&i[0]).sigmoid())?;
        rollout.backward(&h.sum(Kind::Float)).unwrap_err();
        Ok((before, model.ws.grad()))
    };
    let (before, after) = failed(true).unwrap();
    assert!(same_bits(&before, &after));
    let (before, after) = failed(false).unwrap();
    assert!(!same_bits(&before, &after));
}

#[test]
fn an_optimizer_sees_the_gradients() {
    let trained = |plain: bool| {
        let setup = Setup::new(linear);
        let mut optimizer = nn::Adam::default().build(&setup.vs, 1e-2).unwrap();
        for _ in 0..3 {
            optimizer.zero_grad();
            if plain {
                chain(&How::Plain, &setup.model, &[]).backward();
            } else {
                replayed(&setup, chain);
            }
            optimizer.clip_grad_norm(0.1);
            optimizer.step();
        }
        setup.model.ws.detach()
    };
    assert!(same_bits(&trained(true), &trained(false)));
}

/// An old gradient that cannot take the new one is an error before any gradient is touched.
#[test]
fn an_old_gradient_of_another_shape_is_an_error_and_all_stay() {
    let options = (Kind::Float, tch::Device::Cpu);
    // The last two could take it as far as the number of values goes.
    for old in [&[2i64] as &[i64], &[3, 1], &[1, 3]] {
        let vs = nn::VarStore::new(tch::Device::Cpu);
        let (a, b) = (vs.root().ones("a", &[3]), vs.root().ones("b", old));
        (a.sum(Kind::Float) + b.sum(Kind::Float)).backward();
        b.shallow_clone().set_data(&Tensor::ones([3], options));
        let rollout = Rollout::new(&vs);
        let y = rollout.block("both", &[("x", &Tensor::ones([3], options))], |_, i| &i[0] * &a * &b).unwrap();
        assert!(rollout.backward(&y.sum(Kind::Float)).is_err());
        assert!(a.grad().equal(&Tensor::ones([3], options)) && b.grad().equal(&Tensor::ones(old, options)), "{old:?}");
    }
}

/// LibTorch gives both leaves one tensor's storage as their first gradient. With that, the second block's addition to one
/// would be an addition to the other too. Each is used once in each block: plain autograd's bits.
#[test]
fn gradients_that_share_storage_at_first_are_added_to_apart() {
    let build = |path: &nn::Path<'_>| (path.ones("position", &[6]), path.ones("kind", &[6]));
    replay_tests::assert_exact(
        replay_tests::Oracle::Plain,
        || Setup::new(build),
        |how, (position, kind), _| {
            let mut h = randn(1, &[5, 6], Kind::Float);
            for _ in 0..3 {
                h = how.block("embed", &[("h", &h)], move |i| &i[0] + (position.unsqueeze(0) + kind.unsqueeze(0)));
            }
            h.sum(Kind::Float)
        },
    );
}

/// The gradient of the weight and the one that travels on to the block before share storage, too.
#[test]
fn a_gradient_on_its_way_is_not_added_to() {
    let build = |path: &nn::Path<'_>| path.ones("w", &[6]);
    replay_tests::assert_exact(
        replay_tests::Oracle::Plain,
        || Setup::new(build).leaf("x", randn(2, &[6], Kind::Float).set_requires_grad(true)),
        |how, w, leaves| {
            let x = leaves[0].1.sin();
            let side = how.block("side", &[("x", &x)], move |i| i[0].sin() + w);
            let h = how.block("last", &[("x", &x)], move |i| i[0].view([1, 6]) + w.view([1, 6]));
            h.sin().sum(Kind::Float) + side.sin().sum(Kind::Float)
        },
    );
}

/// What a rollout leaves behind is apart as well, for what is added next.
#[test]
fn gradients_are_apart_after_the_backward_pass() {
    let setup = Setup::new(|path| (path.ones("a", &[6]), path.ones("b", &[6])));
    let (a, b) = &setup.model;
    for _ in 0..2 {
        let rollout = Rollout::new(&setup.vs);
        rollout.backward(&(a.view([2, 3]) + b.view([2, 3])).cos().sum(Kind::Float)).unwrap();
    }
    assert!(a.grad().data_ptr() != b.grad().data_ptr());
    let expected = Tensor::full([6], -2.0 * 2f64.sin(), (Kind::Float, tch::Device::Cpu));
    assert!(same_bits(&a.grad(), &expected) && same_bits(&b.grad(), &expected));
}
