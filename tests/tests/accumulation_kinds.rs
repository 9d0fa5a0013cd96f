//! Guarantee *accumulation*, in a wider kind: with `accumulate_in` the gradients of all blocks of bf16 and f16
//! parameters are added up in f32, and nothing else changes.
//!
//! The oracle is LibTorch's autograd over one block at a time, the last one first, with each block's gradients cast and
//! added up here.

use replay_runtime::Rollout;
use replay_tests::narrow::{BLOCKS, chain, grads, start, start_grad, step, store, tail};
use replay_tests::{randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

/// The weight's gradient of [`chain`], added up in `sum`.
fn oracle(w: &Tensor, sum: Kind) -> Tensor {
    let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
    let w = leaf(w);
    let mut inputs = vec![leaf(&start(w.kind()))];
    for i in 0..BLOCKS {
        inputs.push(leaf(&step(&inputs[i], &w)));
    }
    let around = grads(&tail(&inputs[BLOCKS], &w), &[&w, &inputs[BLOCKS]]);
    let (mut total, mut arrived) = (around[0].to_kind(sum), around[1].shallow_clone());
    for input in inputs[..BLOCKS].iter().rev() {
        // The gradient of the product's sum with respect to the output is `arrived`, to the last bit.
        let block = grads(&(step(input, &w) * &arrived).sum(w.kind()), &[&w, input]);
        total += block[0].to_kind(sum);
        arrived = block[1].shallow_clone();
    }
    total
}

#[test]
fn the_sum_is_that_of_the_blocks_gradients_in_f32() {
    for (kind, sum) in [
        (Kind::BFloat16, Kind::Float),
        (Kind::Half, Kind::Float),
        (Kind::BFloat16, Kind::Double),
        (Kind::Float, Kind::Double),
        (Kind::Float, Kind::Float),
        (Kind::Double, Kind::Double),
    ] {
        for restore in [true, false] {
            let (vs, w) = store(kind);
            let rollout = Rollout::builder(&vs).restore_gradients(restore).accumulate_in(sum).build();
            let loss = chain(&rollout, &w);
            let report = rollout.backward(&loss).unwrap();
            assert!(same_bits(&w.grad(), &oracle(&w, sum)), "{kind:?} in {sum:?}:\n{}\n{}", w.grad(), oracle(&w, sum));
            assert_eq!((w.kind(), report.gradient_bytes_copied), (kind, 0));
        }
        // And in its own kind without the choice.
        let (vs, w) = store(kind);
        let rollout = Rollout::new(&vs);
        let loss = chain(&rollout, &w);
        rollout.backward(&loss).unwrap();
        assert!(same_bits(&w.grad(), &oracle(&w, kind)), "{kind:?}");
    }
}

/// A weight used twice in each block: cast before the block's own sum, too.
#[test]
fn uses_inside_one_block_are_added_up_in_f32_too() {
    let (vs, w) = store(Kind::BFloat16);
    let x = start(w.kind());
    let body = |x: &Tensor, first: &Tensor, second: &Tensor| x.matmul(first).tanh().matmul(second).tanh();
    let rollout = Rollout::builder(&vs).accumulate_in(Kind::Float).build();
    let held = &w;
    let y = rollout.block("twice", &[("x", &x)], move |_, i| body(&i[0], held, held)).unwrap();
    rollout.backward(&y.to_kind(Kind::Float).sum(Kind::Float)).unwrap();

    let [first, second] = [0, 1].map(|_| w.detach().set_requires_grad(true));
    let parts = grads(&body(&x, &first, &second).to_kind(Kind::Float).sum(Kind::Float), &[&first, &second]);
    let expected = parts[1].to_kind(Kind::Float) + parts[0].to_kind(Kind::Float);
    assert!(same_bits(&w.grad(), &expected));
    assert!(!same_bits(&w.grad(), &(&parts[1] + &parts[0]).to_kind(Kind::Float)));
}

/// A thousand contributions of like size: in bf16 the sum stands still after 256 of them.
#[test]
fn small_contributions_of_a_long_rollout_are_not_lost() {
    let error = |kind: Option<Kind>, parameters: Kind| {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().zeros("w", &[4]);
        vs.set_kind(parameters);
        let rates = (randn(5, &[1000, 4], Kind::Float).abs() * 1e-3 + 1e-3).to_kind(parameters);
        let builder = Rollout::builder(&vs);
        let rollout = kind.map_or_else(|| Rollout::new(&vs), |kind| builder.accumulate_in(kind).build());
        let mut h = Tensor::zeros([4], (parameters, Device::Cpu));
        for t in 0..1000 {
            let w = w.shallow_clone();
            h = rollout.block("drift", &[("h", &h), ("rate", &rates.get(t))], move |_, i| &i[0] + &i[1] * &w).unwrap();
        }
        rollout.backward(&h.to_kind(Kind::Float).sum(Kind::Float)).unwrap();
        // The derivative of each block with respect to the weight is its rate.
        let exact = rates.to_kind(Kind::Double).sum_dim_intlist(0i64, false, Kind::Double);
        ((w.grad().to_kind(Kind::Double) - &exact) / &exact).abs().max().double_value(&[])
    };
    for narrow in [Kind::BFloat16, Kind::Half] {
        assert!(error(Some(Kind::Float), narrow) < 1e-5, "{narrow:?}");
        assert!(error(Some(Kind::Double), narrow) < 1e-12, "{narrow:?}");
    }
    assert!(error(None, Kind::BFloat16) > 0.3);
    assert!(error(None, Kind::Half) > 1e-3);
}

#[test]
fn a_tied_parameter_counts_once_and_a_frozen_one_not_at_all() {
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().var_copy("w", &randn(3, &[6, 6], Kind::Float));
    let tied = vs.root().add("tied", w.shallow_clone(), true);
    let frozen = vs.root().var_copy("frozen", &randn(4, &[6, 6], Kind::Float)).set_requires_grad(false);
    let idle = vs.root().var_copy("idle", &randn(5, &[6, 6], Kind::Float));
    vs.set_kind(Kind::BFloat16);
    let x = start(Kind::BFloat16);
    let rollout = Rollout::builder(&vs).accumulate_in(Kind::Float).build();
    let (first, second, constant) = (&w, &tied, &frozen);
    let body = move |h: &Tensor| h.matmul(second) + h.matmul(constant);
    let h = rollout.block("first", &[("x", &x)], move |_, i| i[0].matmul(first).tanh()).unwrap();
    let y = rollout.block("second", &[("h", &h)], move |_, i| body(&i[0])).unwrap();
    rollout.backward(&y.to_kind(Kind::Float).sum(Kind::Float)).unwrap();

    let [w1, w2] = [0, 1].map(|_| w.detach().set_requires_grad(true));
    let h = x.matmul(&w1).tanh();
    let y = h.matmul(&w2) + h.matmul(constant);
    let parts = grads(&y.to_kind(Kind::Float).sum(Kind::Float), &[&w1, &w2]);
    assert!(same_bits(&w.grad(), &(parts[1].to_kind(Kind::Float) + parts[0].to_kind(Kind::Float))));
    assert!(same_bits(&tied.grad(), &w.grad()));
    assert!(!frozen.grad().defined() && !idle.grad().defined());
}

/// A leaf that no store knows, as input and captured.
#[test]
fn other_leaves_are_widened_as_parameters_are() {
    let vs = nn::VarStore::new(Device::Cpu);
    let leaf = start(Kind::BFloat16).set_requires_grad(true);
    let held = leaf.shallow_clone();
    let rollout = Rollout::builder(&vs).accumulate_in(Kind::Float).build();
    let y = rollout.block("both", &[("x", &leaf)], move |_, i| i[0].sin() * held.cos()).unwrap();
    rollout.backward(&(y + leaf.exp()).to_kind(Kind::Float).sum(Kind::Float)).unwrap();

    let [a, b, c] = [0, 1, 2].map(|_| leaf.detach().set_requires_grad(true));
    let parts = grads(&(a.sin() * b.cos() + c.exp()).to_kind(Kind::Float).sum(Kind::Float), &[&a, &b, &c]);
    let wide = |i: usize| parts[i].to_kind(Kind::Float);
    // The captured one is accumulated inside; around it, the two others are added before they are.
    assert!(same_bits(&leaf.grad(), &(wide(1) + (wide(2) + wide(0)))));
}

/// The old gradient is widened, or is wide enough and takes the sum in place.
#[test]
fn old_gradients_are_added_to() {
    for restore in [true, false] {
        for old_kind in [Kind::BFloat16, Kind::Float] {
            let (vs, w) = store(Kind::BFloat16);
            let old = start_grad(&w, old_kind, restore);
            let before = old.copy();
            let rollout = Rollout::builder(&vs).restore_gradients(restore).accumulate_in(Kind::Float).build();
            let x = start(w.kind());
            let held = &w;
            let y = rollout.block("step", &[("x", &x)], move |_, i| step(&i[0], held)).unwrap();
            let report = rollout.backward(&y.to_kind(Kind::Float).sum(Kind::Float)).unwrap();

            let leaf = w.detach().set_requires_grad(true);
            let fresh = &grads(&step(&x, &leaf).to_kind(Kind::Float).sum(Kind::Float), &[&leaf])[0];
            assert!(same_bits(&w.grad(), &(before.to_kind(Kind::Float) + fresh.to_kind(Kind::Float))));
            if old_kind == Kind::Float {
                assert_eq!(old.data_ptr(), w.grad().data_ptr());
            } else {
                assert!(same_bits(&old, &before), "the old handle keeps the old values");
            }
            let copied = if old_kind == Kind::BFloat16 && !restore { 36 * 4 } else { 0 };
            assert_eq!(report.gradient_bytes_copied, copied);
        }
    }
}

/// What was not reached keeps its old gradient as it was, of whatever kind.
#[test]
fn what_receives_nothing_keeps_what_it_had() {
    for restore in [true, false] {
        let (vs, w) = store(Kind::BFloat16);
        let idle = vs.root().zeros("idle", &[2]);
        let mut late = idle.shallow_clone();
        late.set_data(&idle.to_kind(Kind::Half));
        (&late * 2.0).sum(Kind::Half).backward();
        let rollout = Rollout::builder(&vs).restore_gradients(restore).accumulate_in(Kind::Float).build();
        let loss = chain(&rollout, &w);
        rollout.backward(&loss).unwrap();
        let grad = late.grad().to_kind(Kind::Float);
        assert!(same_bits(&grad, &Tensor::from_slice(&[2f32, 2.0])));
        assert_eq!(late.grad().kind(), if restore { Kind::Half } else { Kind::Float });
    }
}

#[test]
fn sparse_gradients_are_added_up_in_f32() {
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let tokens = Tensor::from_slice(&[1i64, 3, 3, 9]);
    for dense_first in [false, true] {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let table = nn::embedding(vs.root(), 10, 4, config);
        vs.set_kind(Kind::BFloat16);
        if dense_first {
            (&table.ws * 0.3).sum(Kind::BFloat16).backward();
        }
        let old = dense_first.then(|| table.ws.grad().to_kind(Kind::Float));
        let rollout = Rollout::builder(&vs).accumulate_in(Kind::Float).build();
        let body = |_: &Rollout<'_>, i: &[Tensor]| nn::Module::forward(&table, &i[0]);
        let once = rollout.block("embed", &[("tokens", &tokens)], body).unwrap();
        let again = rollout.block("embed", &[("tokens", &tokens)], body).unwrap();
        let loss = (once.to_kind(Kind::Float) * 0.01 + again.to_kind(Kind::Float) * 3.0).sum(Kind::Float);
        let report = rollout.backward(&loss).unwrap();
        let narrow = |value: f32| Tensor::from(value).to_kind(Kind::BFloat16).to_kind(Kind::Float);
        let counts = Tensor::from_slice(&[0f32, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
            .unsqueeze(1)
            .expand([10, 4], false);
        let expected = counts * (narrow(3.0) + narrow(0.01));
        let expected = old.map_or(expected.shallow_clone(), |old| old + &expected);
        let found = table.ws.grad().to_dense(None::<Kind>, false);
        assert_eq!(found.kind(), Kind::Float);
        assert!(found.allclose(&expected, 1e-6, 0.0, false), "{found}\n{expected}");
        assert_eq!(report.gradient_bytes_copied, if dense_first { 160 } else { 0 });
    }
}
