//! Guarantee *devices*, on a GPU: what reaches CUDA by another way than an input, what a body sees there, and what
//! offload keeps and gives back. All of it needs a GPU, and is compiled without one.
//!
//! Kernels that add in no fixed order are not used, and each weight is used once per block: plain autograd is the
//! oracle.

use std::cell::RefCell;
use std::thread;

use replay_runtime::{AutocastGuard, ReplayError, Rollout, cuda};
use replay_tests::{randn, same_bits};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

fn model() -> (nn::VarStore, nn::Linear) {
    cuda::load().expect("CUDA loads");
    tch::manual_seed(7);
    let vs = nn::VarStore::new(GPU);
    let model = nn::linear(vs.root(), 32, 32, nn::LinearConfig::default());
    (vs, model)
}

fn x() -> Tensor {
    randn(3, &[8, 32], Kind::Float)
}

fn grads(vs: &nn::VarStore) -> Vec<Tensor> {
    vs.trainable_variables().iter().map(Tensor::grad).collect()
}

fn assert_same(expected: &[Tensor], found: &[Tensor]) {
    assert!(!expected.is_empty() && expected.iter().zip(found).all(|(a, b)| same_bits(a, b)));
}

/// The gradients of three steps by plain calls or by blocks that are given `body`'s input on the CPU.
fn from_the_cpu(replay: bool, body: impl Fn(&nn::Linear, &Tensor) -> Tensor) -> (Vec<Tensor>, Tensor) {
    let (vs, model) = model();
    let (model, body) = (&model, &body);
    let rollout = Rollout::new(&vs);
    let mut loss = Tensor::zeros([], (Kind::Float, GPU));
    tch::manual_seed(11);
    for _ in 0..3 {
        let y = if replay {
            rollout.block("hop", &[("x", &x())], move |_, i| body(model, &i[0])).unwrap()
        } else {
            body(model, &x())
        };
        loss += y.square().sum(Kind::Float);
    }
    if replay {
        drop(rollout.backward(&loss).unwrap());
    } else {
        loss.backward();
    }
    (grads(&vs), Tensor::rand([4], (Kind::Float, GPU)))
}

/// Only the parameters are on the GPU, and so only they tell that its generator matters.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn dropout_where_only_the_parameters_are_on_the_gpu() {
    let body = |model: &nn::Linear, x: &Tensor| model.forward(&x.to_device(GPU)).dropout(0.4, true);
    let (plain, replayed) = (from_the_cpu(false, body), from_the_cpu(true, body));
    assert_same(&plain.0, &replayed.0);
    assert!(same_bits(&plain.1, &replayed.1), "the caller's stream");
}

/// Under autocast to a type that is not the default, left before the backward pass.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn autocast_on_the_gpu_is_that_of_the_forward() {
    let (vs, model) = model();
    let kinds = RefCell::new(Vec::new());
    let rollout = Rollout::new(&vs);
    let mut loss = Tensor::zeros([], (Kind::Float, GPU));
    for kind in [Kind::BFloat16, Kind::Half] {
        let _autocast = AutocastGuard::new(GPU, kind);
        let y = rollout.block("cast", &[("x", &x().to_device(GPU))], |_, i| {
            let y = model.forward(&i[0]);
            kinds.borrow_mut().push(y.kind());
            y.to_kind(Kind::Float)
        });
        loss += y.unwrap().sum(Kind::Float);
    }
    rollout.backward(&loss).unwrap();
    assert_eq!(kinds.take(), [Kind::BFloat16, Kind::Half, Kind::Half, Kind::BFloat16]);
}

thread_local!(static CONFIGURED: RefCell<Option<&'static str>> = const { RefCell::new(None) });

/// LibTorch runs the nodes of a GPU on a thread of its own, which knows nothing of what is local to the caller's.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn a_body_sees_its_own_thread_and_device() {
    let (vs, model) = model();
    let seen = RefCell::new(Vec::new());
    CONFIGURED.set(Some("by the caller"));
    let rollout = Rollout::new(&vs);
    let y = rollout.block("looks", &[("x", &x().to_device(GPU))], |_, i| {
        seen.borrow_mut().push((thread::current().id(), CONFIGURED.with_borrow(|c| *c), i[0].device()));
        model.forward(&i[0])
    });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(seen.take(), [(thread::current().id(), Some("by the caller"), GPU); 2]);
}

/// A lock of the user's that two blocks take, with a hop to the engine's thread between them.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn blocks_that_share_a_lock_on_the_gpu() {
    let calls = std::sync::Mutex::new(0);
    let (vs, model) = model();
    let rollout = Rollout::new(&vs);
    let block = |x: &Tensor| {
        let body = |_: &Rollout<'_>, i: &[Tensor]| {
            *calls.try_lock().expect("nobody holds the lock") += 1;
            model.forward(&i[0].to_device(GPU))
        };
        rollout.block("locks", &[("x", x)], body).unwrap()
    };
    let (a, b) = (block(&x()), block(&x().to_device(GPU)));
    rollout.backward(&(a * b).sum(Kind::Float)).unwrap();
    assert_eq!(calls.into_inner().unwrap(), 4);
}

/// Outputs stay on the device that plain calls give them, offload or not, and so do gradients.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn outputs_are_on_the_devices_of_plain_calls() {
    let (vs, model) = model();
    for offload in [false, true] {
        let rollout = Rollout::builder(&vs).offload(offload).build();
        let start = x().to_device(GPU).set_requires_grad(true);
        let mut h = start.shallow_clone();
        for _ in 0..3 {
            let (next, on_cpu) = rollout
                .block("both", &[("h", &h)], |_, i| {
                    (model.forward(&i[0]), i[0].mean(Kind::Float).to_device(Device::Cpu))
                })
                .unwrap();
            assert_eq!((next.device(), on_cpu.device()), (GPU, Device::Cpu));
            h = next * on_cpu.to_device(GPU);
        }
        rollout.backward(&h.sum(Kind::Float)).unwrap();
        assert_eq!(start.grad().device(), GPU);
    }
}

/// The input's bytes go to the host, not the weights'; a weight that is passed as an input stays too.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn offload_takes_inputs_and_no_weights() {
    let (vs, model) = model();
    let rollout = Rollout::builder(&vs).offload(true).build();
    let inputs = [("x", &x().to_device(GPU)), ("weight", &model.ws)];
    let y = rollout.block("wide", &inputs, |_, i| i[0].matmul(&i[1])).unwrap();
    let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
    assert_eq!(report.total.bytes_on_host, 8 * 32 * 4);
}

/// Whatever layout an input has, it comes back from the host in it.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn offload_keeps_layouts() {
    let layouts: [fn(&Tensor) -> Tensor; 7] = [
        |x| x.transpose(1, 3),
        |x| x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
        |x| x.narrow(1, 1, 2).narrow(3, 2, 3),
        |x| x.narrow(0, 0, 1).expand([5, 3, 6, 6], false),
        |x| x.narrow(0, 0, 0),
        |x| x.view(-1).get(7),
        |x| x.to_kind(Kind::ComplexFloat).transpose(0, 1),
    ];
    let (vs, model) = model();
    for (number, layout) in layouts.into_iter().enumerate() {
        let seen = RefCell::new(Vec::new());
        let x = layout(&randn(2, &[4, 3, 6, 6], Kind::Float).to_device(GPU));
        let rollout = Rollout::builder(&vs).offload(true).build();
        let y = rollout.block("looks", &[("x", &x)], |_, i| {
            seen.borrow_mut().push((i[0].size(), i[0].stride(), i[0].copy().to_device(Device::Cpu)));
            let x = if i[0].is_complex() { i[0].abs() } else { i[0].shallow_clone() };
            x.sum(Kind::Float) * model.ws.sum(Kind::Float)
        });
        rollout.backward(&y.unwrap()).unwrap();
        let seen = seen.take();
        assert_eq!((&seen[0].0, &seen[0].1), (&seen[1].0, &seen[1].1), "layout {number}");
        assert!(same_bits(&seen[0].2, &seen[1].2), "layout {number}");
    }
}

/// Inputs are dropped right after the forward and their memory is used again, two hundred times.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn offloaded_inputs_survive_the_reuse_of_their_memory() {
    let run = |offload: bool| {
        let (vs, model) = model();
        let model = &model;
        for _ in 0..200 {
            let rollout = Rollout::builder(&vs).offload(offload).build();
            let mut h = x().to_device(GPU);
            for _ in 0..4 {
                let noise = Tensor::ones([8, 32], (Kind::Float, GPU)) * 0.5;
                h = rollout
                    .block("step", &[("h", &h), ("noise", &noise)], move |_, i| model.forward(&(&i[0] * &i[1])))
                    .unwrap();
                drop(noise);
                let _ = Tensor::full([8, 32], f64::NAN, (Kind::Float, GPU));
            }
            rollout.backward(&h.mean(Kind::Float)).unwrap();
        }
        grads(&vs)
    };
    assert_same(&run(false), &run(true));
}

/// An old gradient that stayed on the CPU when its variable moved cannot take a new one; it is an error, and it stays.
#[test]
#[cfg_attr(not(cuda), ignore = "needs a CUDA device, and build.rs found none")]
fn an_old_gradient_on_another_device_is_an_error() {
    cuda::load().expect("CUDA loads");
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().var("w", &[4], nn::Init::Const(0.5));
    w.sum(Kind::Float).backward();
    w.shallow_clone().set_data(&w.detach().to_device(GPU));
    let rollout = Rollout::new(&vs);
    let y = rollout.block("step", &[("x", &Tensor::ones([4], (Kind::Float, GPU)))], |_, i| &i[0] * &w);
    let error = rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::Backward { .. }) && error.to_string().contains("old gradient"), "{error}");
    assert_eq!(w.grad().device(), Device::Cpu);
}
