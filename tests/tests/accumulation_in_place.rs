//! Guarantee *accumulation*, in place: no gradient is copied by the library where LibTorch could add to it, and the
//! memory that the first block's gradient is in takes those of all others.

use std::cell::RefCell;
use std::collections::HashSet;

use replay_runtime::{Rollout, RolloutReport, is_replaying};
use replay_tests::{randn, same_bits};
use tch::nn::{self, Module, RNN};
use tch::{Device, Kind, Tensor};

fn small(seed: i64, size: &[i64]) -> Tensor {
    randn(seed, size, Kind::Float) * 0.3
}

/// Runs five blocks of `body`, and notes where the variables' gradients are whenever a block is replayed.
///
/// With `old` there are gradients before.
fn run(vs: &nn::VarStore, old: bool, restore: bool, start: &Tensor, body: impl Fn(&Tensor) -> Tensor) -> RolloutReport {
    tch::set_num_threads(1);
    let mut optimizer = nn::OptimizerConfig::build(nn::Sgd::default(), vs, 0.0).unwrap();
    optimizer.zero_grad();
    if old {
        vs.trainable_variables().iter().for_each(|variable| (variable * 2.0).sum(Kind::Float).backward());
    }
    let handles: Vec<_> = vs.trainable_variables().iter().map(Tensor::grad).collect();
    let seen = RefCell::new(vec![HashSet::new(); handles.len()]);
    let rollout = Rollout::builder(vs).restore_gradients(restore).build();
    let (body, noted) = (&body, &seen);
    let mut h = start.shallow_clone();
    for _ in 0..5 {
        h = rollout
            .block("step", &[("h", &h)], move |_, i| {
                if is_replaying() {
                    for (variable, seen) in vs.trainable_variables().iter().zip(noted.borrow_mut().iter_mut()) {
                        let grad = variable.grad();
                        if grad.defined() {
                            seen.insert(grad.data_ptr());
                        }
                    }
                }
                body(&i[0])
            })
            .unwrap();
    }
    let report = rollout.backward(&h.square().sum(Kind::Float)).unwrap();
    for ((variable, handle), seen) in vs.trainable_variables().iter().zip(&handles).zip(seen.borrow().iter()) {
        let grad = variable.grad();
        assert_eq!(seen.len(), 1, "a gradient has moved, or was not there after the first block");
        if old {
            assert_eq!(grad.data_ptr(), handle.data_ptr());
            assert!(same_bits(&grad, handle), "the old handle holds the sum");
            assert_eq!(seen.contains(&handle.data_ptr()), !restore);
        } else {
            assert!(seen.contains(&grad.data_ptr()));
        }
    }
    report
}

/// With and without old gradients, with and without the transaction: how many bytes were copied.
fn copied(vs: &nn::VarStore, start: &Tensor, body: impl Fn(&Tensor) -> Tensor) -> Vec<u64> {
    let ways = [(false, true), (false, false), (true, true), (true, false)];
    ways.map(|(old, restore)| run(vs, old, restore, start, &body).gradient_bytes_copied).to_vec()
}

#[test]
fn a_multilayer_perceptron_copies_nothing() {
    let vs = nn::VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(vs.root() / "a", 6, 16, nn::LinearConfig::default()))
        .add_fn(|x| x.gelu("none"))
        .add(nn::layer_norm(vs.root() / "n", vec![16], nn::LayerNormConfig::default()))
        .add(nn::linear(vs.root() / "b", 16, 6, nn::LinearConfig::default()));
    assert_eq!(copied(&vs, &small(1, &[5, 6]), |x| x + net.forward(x)), [0; 4]);
    assert_eq!(copied(&vs, &small(1, &[2, 5, 6]), |x| x + net.forward(x)), [0; 4]);
}

#[test]
fn a_decoder_layer_copies_nothing() {
    let vs = nn::VarStore::new(Device::Cpu);
    let linear = |name: &str, from, to| nn::linear(vs.root() / name, from, to, nn::LinearConfig::default());
    let (qkv, out, up, down) = (linear("qkv", 8, 24), linear("out", 8, 8), linear("up", 8, 16), linear("down", 16, 8));
    let gain = vs.root().ones("gain", &[8]);
    let norm = nn::layer_norm(vs.root() / "norm", vec![8], nn::LayerNormConfig::default());
    let position = vs.root().var_copy("position", &small(4, &[5, 8]));
    let table = nn::embedding(vs.root() / "table", 10, 8, nn::EmbeddingConfig::default());
    let tokens = Tensor::from_slice(&[1i64, 2, 2, 7, 9]);
    let layer = |x: &Tensor| {
        let x = x + &position + table.forward(&tokens);
        let parts = qkv.forward(&norm.forward(&x)).view([2, 5, 3, 2, 4]).permute([2, 0, 3, 1, 4]);
        let [q, k, v] = [0, 1, 2].map(|i| parts.get(i));
        let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false);
        let x = x + out.forward(&mixed.transpose(1, 2).reshape([2, 5, 8]));
        let rms = &x * (x.square().mean_dim(-1, true, Kind::Float) + 1e-5).rsqrt() * &gain;
        &x + down.forward(&up.forward(&rms).silu())
    };
    assert_eq!(copied(&vs, &small(1, &[2, 5, 8]), layer), [0; 4]);
}

#[test]
fn convolutions_copy_nothing() {
    let vs = nn::VarStore::new(Device::Cpu);
    let config = nn::ConvConfig { padding: 1, ..Default::default() };
    let conv = nn::conv2d(vs.root() / "conv", 3, 3, 3, config);
    let norm = nn::group_norm(vs.root() / "norm", 3, 3, nn::GroupNormConfig::default());
    assert_eq!(copied(&vs, &small(1, &[2, 3, 8, 8]), |x| x + norm.forward(&conv.forward(x)).silu()), [0; 4]);
}

#[test]
fn recurrent_layers_copy_nothing() {
    let vs = nn::VarStore::new(Device::Cpu);
    let lstm = nn::lstm(vs.root() / "lstm", 6, 6, nn::RNNConfig::default());
    let gru = nn::gru(vs.root() / "gru", 6, 6, nn::RNNConfig::default());
    assert_eq!(copied(&vs, &small(1, &[2, 5, 6]), |x| gru.seq(&lstm.seq(x).0).0), [0; 4]);
}

/// One weight used three ways: transposed, viewed and as it is.
#[test]
fn shared_weights_copy_nothing() {
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().var_copy("w", &small(3, &[6, 6]));
    let _ = vs.root().add("tied", w.shallow_clone(), true);
    let body = |x: &Tensor| x.matmul(&w).tanh().matmul(&w.tr()) + w.view([36]).slice(0, 0, 6, 1) + w.get(2);
    assert_eq!(copied(&vs, &small(1, &[5, 6]), body), [0; 4]);
}

/// Where LibTorch gives two leaves one storage, one of them gets its own: once in a rollout, however long it is.
#[test]
fn gradients_that_share_storage_are_copied_once() {
    let vs = nn::VarStore::new(Device::Cpu);
    let (a, b) = (vs.root().var_copy("a", &small(3, &[6])), vs.root().var_copy("b", &small(4, &[6])));
    let body = |x: &Tensor| (x + (a.unsqueeze(0) + b.unsqueeze(0))).tanh();
    assert_eq!(copied(&vs, &small(1, &[5, 6]), body), [24, 24, 24, 0]);
}

/// A part of a storage is taken out of it, so that the rest does not live on beside it.
#[test]
fn gradients_that_are_parts_of_a_larger_storage_are_copied_once() {
    let vs = nn::VarStore::new(Device::Cpu);
    let (a, b) = (vs.root().var_copy("a", &small(3, &[6, 2])), vs.root().var_copy("b", &small(4, &[6, 3])));
    let c = vs.root().var_copy("c", &small(5, &[2, 6]));
    let constant = small(5, &[100, 6]);
    let body = |x: &Tensor| {
        let fused = Tensor::cat(&[&a.tr(), &b.tr(), &c, &constant], 0);
        x.matmul(&fused.tr()).tanh().matmul(&fused)
    };
    // The first two are laid out otherwise than their leaves, so that LibTorch itself copies them.
    assert_eq!(copied(&vs, &small(1, &[5, 6]), body), [48, 48, 48, 0]);
}

/// A failure copies nothing either: what was aside comes back as it is, and where there was nothing there is nothing.
#[test]
fn a_failure_copies_nothing() {
    let vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 6, 6, nn::LinearConfig::default());
    (&linear.ws * 2.0).sum(Kind::Float).backward();
    let old = linear.ws.grad();
    let before = old.copy();
    let address = old.data_ptr();
    let rollout = Rollout::new(&vs);
    let (model, x) = (&linear, small(1, &[5, 6]));
    let fails = move |_: &Rollout<'_>, i: &[Tensor]| {
        if is_replaying() { Err("no second time") } else { Ok(model.forward(&i[0])) }
    };
    let h = rollout.block("fails", &[("x", &x)], fails).unwrap();
    let h = rollout.block("last", &[("h", &h)], move |_, i| model.forward(&i[0])).unwrap();
    rollout.backward(&h.sum(Kind::Float)).unwrap_err();
    assert!(linear.ws.grad().data_ptr() == address && old.data_ptr() == address);
    assert!(same_bits(&old, &before) && !linear.bs.as_ref().unwrap().grad().defined());
}

/// A sparse old gradient cannot take a dense one: it is added to the new one, in place.
#[test]
fn an_old_sparse_gradient_goes_into_the_dense_one() {
    let vs = nn::VarStore::new(Device::Cpu);
    let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
    let table = nn::embedding(vs.root(), 10, 4, config);
    table.forward(&Tensor::from_slice(&[2i64, 2])).sum(Kind::Float).backward();
    let old = table.ws.grad();
    assert!(old.is_sparse());
    let before = old.to_dense(None::<Kind>, false);
    let rollout = Rollout::new(&vs);
    let (held, x) = (&table, small(1, &[3, 10]));
    let y = rollout.block("mix", &[("x", &x)], move |_, i| i[0].matmul(&held.ws).tanh()).unwrap();
    let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
    let leaf = table.ws.detach().set_requires_grad(true);
    let fresh = &Tensor::run_backward(&[x.matmul(&leaf).tanh().sum(Kind::Float)], &[&leaf], false, false)[0];
    assert!(same_bits(&table.ws.grad(), &(fresh + &before)));
    assert_eq!(report.gradient_bytes_copied, 0);
    assert!(same_bits(&old.to_dense(None::<Kind>, false), &before));
}

/// The table says so where there is something to say.
#[test]
fn the_report_tells_of_copies() {
    let vs = nn::VarStore::new(Device::Cpu);
    let (a, b) = (vs.root().zeros("a", &[50_000]), vs.root().zeros("b", &[50_000]));
    let report = run(&vs, false, true, &small(1, &[2, 50_000]), |x| x + (a.unsqueeze(0) + b.unsqueeze(0)));
    assert_eq!(report.gradient_bytes_copied, 200_000);
    assert!(report.to_string().ends_with("s, 0.2 MB of gradients copied"), "{report}");
    assert!(run(&vs, false, true, &small(1, &[2, 50_000]), |x| x * &a * &b).to_string().ends_with(" s"));
}
