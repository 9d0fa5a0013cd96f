//! Guarantee *values*: gradients equal the oracle's bit for bit, on CPU with one thread.

use replay_runtime::Rollout;
use replay_tests::{How, Oracle, Setup, assert_exact, randn, replayed};
use tch::{Kind, Tensor, nn, nn::Module};

fn linear(path: &nn::Path<'_>) -> nn::Linear {
    nn::linear(path, 6, 6, nn::LinearConfig::default())
}

fn chain<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, _: &[(String, Tensor)]) -> Tensor {
    let mut state = randn(1, &[5, 6], Kind::Float);
    let mut loss = Tensor::from(0f32);
    for _ in 0..7 {
        state = how.block("step", &[("state", &state)], |i| model.forward(&i[0]).tanh());
        loss += state.square().mean(Kind::Float);
    }
    loss
}

/// Each weight is used once inside each block and nowhere else: sums associate alike.
#[test]
fn a_chain_equals_plain_autograd() {
    assert_exact(Oracle::Plain, || Setup::new(linear), chain);
}

#[test]
fn a_chain_equals_blockwise_autograd() {
    assert_exact(Oracle::Blockwise, || Setup::new(linear), chain);
}

/// A weight used twice inside each block: the block adds its own two contributions first.
fn twice<'m>(how: &How<'_, 'm>, model: &'m nn::Linear, _: &[(String, Tensor)]) -> Tensor {
    let mut state = randn(1, &[5, 6], Kind::Float);
    for _ in 0..4 {
        state = how.block("step", &[("state", &state)], |i| model.forward(&model.forward(&i[0]).tanh()).sigmoid());
    }
    state.square().sum(Kind::Float)
}

#[test]
fn a_weight_used_twice_in_a_block_equals_blockwise_autograd() {
    assert_exact(Oracle::Blockwise, || Setup::new(linear), twice);
}

#[test]
fn several_inputs_and_outputs_with_gradients_of_the_inputs() {
    let setup = || {
        Setup::new(linear)
            .leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
            .leaf("y", randn(3, &[5, 6], Kind::Float).set_requires_grad(true))
    };
    assert_exact(Oracle::Plain, setup, |how, model, leaves| {
        let inputs = [("x", &leaves[0].1), ("y", &leaves[1].1)];
        let (a, b) = how.block("pair", &inputs, |i| (model.forward(&i[0]) * i[1].exp(), i[1].sin()));
        a.sum(Kind::Float) + b.square().sum(Kind::Float)
    });
}

#[test]
fn an_unused_output_changes_nothing() {
    assert_exact(
        Oracle::Plain,
        || Setup::new(linear),
        |how, model, _| {
            let x = randn(2, &[5, 6], Kind::Float);
            let (a, _) = how.block("pair", &[("x", &x)], |i| {
                let h = model.forward(&i[0]);
                (h.tanh(), h.exp())
            });
            a.sum(Kind::Float)
        },
    );
}

#[test]
fn an_integer_input_selects_rows() {
    let build = |path: &nn::Path<'_>| nn::embedding(path, 10, 4, nn::EmbeddingConfig::default());
    assert_exact(
        Oracle::Plain,
        || Setup::new(build),
        |how, model, _| {
            let tokens = Tensor::from_slice(&[1i64, 3, 3, 9]);
            how.block("embed", &[("tokens", &tokens)], |i| model.forward(&i[0])).square().sum(Kind::Float)
        },
    );
}

#[test]
fn the_same_tensor_passed_twice_gets_both_gradients() {
    let setup = || Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true));
    assert_exact(Oracle::Plain, setup, |how, model, leaves| {
        let x = &leaves[0].1;
        how.block("both", &[("a", x), ("b", x)], |i| model.forward(&i[0]) * i[1].cos()).sum(Kind::Float)
    });
}

#[test]
fn plain_autograd_before_between_and_after_blocks() {
    let setup = || Setup::new(linear).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true));
    assert_exact(Oracle::Plain, setup, |how, model, leaves| {
        let mut h = leaves[0].1.sin();
        for _ in 0..3 {
            h = how.block("step", &[("h", &h)], |i| model.forward(&i[0]).tanh());
            h = &h / (h.detach().abs().mean(Kind::Float) + 1.0);
        }
        h.exp().mean(Kind::Float)
    });
}

#[test]
fn a_recurrent_cell_keeps_its_kernels() {
    let build = |path: &nn::Path<'_>| nn::lstm(path, 6, 6, nn::RNNConfig::default());
    assert_exact(
        Oracle::Plain,
        || Setup::new(build),
        |how, model, _| {
            let x = randn(4, &[2, 5, 6], Kind::Float);
            let zeros = Tensor::zeros([1, 2, 6], (Kind::Float, tch::Device::Cpu));
            how.block("lstm", &[("x", &x), ("h", &zeros), ("c", &zeros)], |i| {
                use nn::RNN;
                let state = nn::LSTMState((i[1].shallow_clone(), i[2].shallow_clone()));
                model.seq_init(&i[0], &state).0
            })
            .square()
            .sum(Kind::Float)
        },
    );
}

/// The gradient of a sum is one number for all elements, and the input that it arrives at lies in memory column by column.
/// What comes before adds in the order of memory. One path to the weight: plain autograd's bits.
#[test]
fn a_gradient_keeps_its_own_layout_on_its_way_through_a_block() {
    let setup = || Setup::new(|path| path.var("w", &[2], nn::Init::Randn { mean: 0.0, stdev: 1.0 }));
    for seed in 0..20 {
        assert_exact(Oracle::Plain, setup, |how, w, _| {
            let x = randn(seed, &[2, 2, 3], Kind::Float).transpose(-1, -2);
            let h = how.block("double", &[("x", &x)], move |i| &i[0] * w * 2.0);
            how.block("same", &[("h", &h)], |i| i[0].shallow_clone()).sum(Kind::Float)
        });
    }
}

/// Central differences of the loss, in f64, against the replayed gradient.
#[test]
fn finite_differences_agree() {
    let setup = || {
        Setup::new(|path| path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 }))
            .leaf("x", randn(5, &[3, 4], Kind::Double).set_requires_grad(true))
    };
    let program = |how: &How<'_, '_>, x: &Tensor, w: &Tensor| {
        let mut h = x.shallow_clone();
        for _ in 0..3 {
            let w = w.shallow_clone();
            h = how.block("step", &[("h", &h), ("w", &w)], |i| i[0].matmul(&i[1]).tanh());
        }
        h.square().sum(Kind::Double)
    };
    let setup = setup();
    let w = setup.model.to_kind(Kind::Double).detach().set_requires_grad(true);
    let x = &setup.leaves[0].1;
    let rollout = Rollout::new(&setup.vs);
    let loss = program(&How::Replay(&rollout), x, &w);
    rollout.backward(&loss).unwrap();

    let step = 1e-6;
    for (leaf, other) in [(x, &w), (&w, x)] {
        for i in 0..i64::try_from(leaf.numel()).unwrap() {
            let at = |delta: f64| {
                let moved = leaf.detach().copy();
                let _ = moved.view(-1).get(i).g_add_scalar_(delta);
                let other = other.detach();
                let loss = if std::ptr::eq(leaf, x) {
                    program(&How::Plain, &moved, &other)
                } else {
                    program(&How::Plain, &other, &moved)
                };
                loss.double_value(&[])
            };
            let expected = (at(step) - at(-step)) / (2.0 * step);
            let found = leaf.grad().view(-1).double_value(&[i]);
            assert!((expected - found).abs() < 1e-7 * (1.0 + expected.abs()), "{expected} {found}");
        }
    }
}

#[test]
fn half_precision_types_are_exact_too() {
    for kind in [Kind::BFloat16, Kind::Double] {
        let setup = || Setup::new(linear).leaf("x", randn(2, &[5, 6], kind).set_requires_grad(true));
        assert_exact(Oracle::Plain, setup, |how, _, leaves| {
            let mut h = leaves[0].1.shallow_clone();
            for _ in 0..3 {
                h = how.block("step", &[("h", &h)], |i| (i[0].sin() * 1.5).tanh());
            }
            h.sum(h.kind())
        });
    }
}

/// Blocks in blocks: the outer one is replayed in full, its inner ones replay once more inside.
#[test]
fn nested_blocks_equal_plain_autograd() {
    let outcome = |nested: bool| {
        let setup = Setup::new(linear);
        replay_nested(&setup, nested)
    };
    let plain = outcome(false);
    let nested = outcome(true);
    replay_tests::assert_same(&plain, &nested);
}

fn replay_nested(setup: &Setup<nn::Linear>, nested: bool) -> replay_tests::Outcome {
    let model = &setup.model;
    let x = randn(2, &[5, 6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    if !nested {
        return replayed(setup, |how, model, _| {
            let mut h = randn(2, &[5, 6], Kind::Float);
            for _ in 0..4 {
                h = how.block("inner", &[("h", &h)], |i| model.forward(&i[0]).tanh());
            }
            h.square().sum(Kind::Float)
        });
    }
    let mut h = x;
    for _ in 0..2 {
        h = rollout
            .block("outer", &[("h", &h)], move |rollout, i| {
                let mut h = i[0].shallow_clone();
                for _ in 0..2 {
                    h = rollout.block("inner", &[("h", &h)], move |_, i| model.forward(&i[0]).tanh())?;
                }
                Ok::<_, replay_runtime::ReplayError>(h)
            })
            .unwrap();
    }
    let loss = h.square().sum(Kind::Float);
    rollout.backward(&loss).unwrap();
    replay_tests::Outcome { loss: loss.detach(), grads: setup.grads() }
}
