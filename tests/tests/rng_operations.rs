//! Guarantee *RNG*, for every operation that draws: beside another thread with a rollout only LibTorch's own mark of such
//! operations tells that a block draws. Each block multiplies by the numbers that it drew, and so must its gradient.

use std::sync::mpsc;
use std::thread;

use replay_runtime::Rollout;
use replay_tests::same_bits;
use tch::{Device, Kind, Tensor, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

type Operation = (&'static str, fn(&Tensor) -> Tensor);

fn empty() -> Tensor {
    Tensor::empty([64], CPU)
}

fn half() -> Tensor {
    Tensor::ones([64], CPU) * 0.5
}

fn positive(x: &Tensor) -> Tensor {
    x.abs() + 1.0
}

/// Weights of a recurrent layer of 8 by 8 with `gates` gates, twice.
fn layers(gates: i64) -> Vec<Tensor> {
    let ones = |size: &[i64]| Tensor::ones(size, CPU) * 0.1;
    (0..2)
        .flat_map(|_| [ones(&[8 * gates, 8]), ones(&[8 * gates, 8]), ones(&[8 * gates]), ones(&[8 * gates])])
        .collect()
}

fn lstm(x: &Tensor) -> Tensor {
    let state = [Tensor::ones([2, 1, 8], CPU), Tensor::ones([2, 1, 8], CPU)];
    x.reshape([8, 1, 8]).lstm(&state, &layers(4), true, 2, 0.5, true, false, false).0.reshape([64])
}

fn gru(x: &Tensor) -> Tensor {
    let state = Tensor::ones([2, 1, 8], CPU);
    x.reshape([8, 1, 8]).gru(&state, &layers(3), true, 2, 0.5, true, false, false).0.reshape([64])
}

fn attention(x: &Tensor) -> Tensor {
    let q = x.reshape([1, 1, 8, 8]);
    Tensor::scaled_dot_product_attention(&q, &q, &q, None::<&Tensor>, 0.5, false, None, false).reshape([64])
}

fn init(init: nn::Init) -> Tensor {
    let mut weight = Tensor::zeros([8, 8], CPU);
    weight.init(init);
    weight.reshape([64])
}

const LAYERS: &[Operation] = &[
    ("dropout", |x| x.dropout(0.5, true)),
    ("dropout_", |x| (x + 0.0).dropout_(0.5, true)),
    ("dropout of half floats", |x| x.to_kind(Kind::Half).dropout(0.5, true).to_kind(Kind::Float)),
    ("native_dropout", |x| x.native_dropout(0.5, true).0),
    ("feature_dropout", |x| x.reshape([8, 8]).feature_dropout(0.5, true).reshape([64])),
    ("alpha_dropout", |x| x.alpha_dropout(0.5, true)),
    ("feature_alpha_dropout", |x| x.reshape([8, 8]).feature_alpha_dropout(0.5, true).reshape([64])),
    ("attention", attention),
    ("lstm", lstm),
    ("gru", gru),
    ("init, uniform", |_| init(nn::init::DEFAULT_KAIMING_UNIFORM)),
    ("init, orthogonal", |_| init(nn::Init::Orthogonal { gain: 1.0 })),
];

const TENSORS: &[Operation] = &[
    ("rand", |_| Tensor::rand([64], CPU)),
    ("rand_out", |_| Tensor::rand_out(&empty(), [64])),
    ("rand_like", Tensor::rand_like),
    ("randn", |_| Tensor::randn([64], CPU)),
    ("randn_out", |_| Tensor::randn_out(&empty(), [64])),
    ("randn_like", Tensor::randn_like),
    ("randn of complex numbers", |_| Tensor::randn([64], (Kind::ComplexFloat, Device::Cpu)).real()),
    ("randint", |_| Tensor::randint(1000, [64], CPU)),
    ("randint_low_out", |_| Tensor::randint_low_out(&empty(), 3, 1000, [64])),
    ("randint_like", |x| x.randint_like(1000)),
    ("randperm", |_| Tensor::randperm(64, CPU)),
    ("randperm_out", |_| Tensor::randperm_out(&empty().to_kind(Kind::Int64), 64).to_kind(Kind::Float)),
];

const DISTRIBUTIONS: &[Operation] = &[
    ("bernoulli", |_| half().bernoulli()),
    ("bernoulli_", |_| empty().bernoulli_(&half())),
    ("bernoulli_float_", |_| empty().bernoulli_float_(0.5)),
    ("bernoulli_p", |x| x.bernoulli_p(0.5)),
    ("binomial", |_| Tensor::binomial(&(half() * 40.0), &half())),
    ("cauchy_", |_| empty().cauchy_(0.0, 1.0)),
    ("exponential_", |_| empty().exponential_(1.0)),
    ("exponential_out", |x| x.exponential_out(&empty(), 1.0)),
    ("gamma", |x| positive(x).internal_standard_gamma()),
    ("geometric_", |_| empty().geometric_(0.3)),
    ("log_normal_", |_| empty().log_normal_(0.0, 1.0)),
    ("multinomial", |x| positive(x).multinomial(64, true).to_kind(Kind::Float)),
    ("normal_", |_| empty().normal_(0.0, 1.0)),
    ("normal_functional", |x| x.normal_functional(0.0, 1.0)),
    ("poisson", |x| (positive(x) * 5.0).poisson()),
    ("random_", |_| empty().random_()),
    ("random_to_", |_| empty().random_to_(1000)),
    ("random_from_", |_| empty().random_from_(3, 1000)),
    ("dirichlet", |x| positive(x).internal_sample_dirichlet()),
    ("uniform_", |_| empty().uniform_(0.0, 1.0)),
    ("uniform_out", |x| x.uniform_out(&empty(), 0.0, 1.0)),
];

fn check((name, operation): &Operation) {
    let vs = nn::VarStore::new(Device::Cpu);
    let x = Tensor::arange_start(1, 65, CPU).set_requires_grad(true);
    let again = || operation(&x.detach());
    assert!(!same_bits(&again(), &again()), "{name} draws nothing");
    let rollout = Rollout::new(&vs);
    let outcome = rollout.block(name, &[("x", &x)], |_, i| {
        let drawn = operation(&i[0]).detach();
        (&i[0] * &drawn, drawn)
    });
    let (y, drawn): (Tensor, Tensor) = outcome.unwrap();
    tch::manual_seed(3);
    let expected = again();
    tch::manual_seed(3);
    rollout.backward(&y.sum(Kind::Float)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(same_bits(&x.grad(), &drawn), "{name}: the replay drew other numbers");
    assert!(same_bits(&again(), &expected), "{name}: the caller's stream was disturbed");
}

#[test]
fn every_operation_that_draws_is_noticed_beside_another_thread() {
    let (quit, wait) = mpsc::channel::<()>();
    let (ready, is_ready) = mpsc::channel::<()>();
    let other = thread::spawn(move || {
        let vs = nn::VarStore::new(Device::Cpu);
        let _rollout = Rollout::new(&vs);
        ready.send(()).unwrap();
        let _ = wait.recv();
    });
    is_ready.recv().unwrap();
    [LAYERS, TENSORS, DISTRIBUTIONS].into_iter().flatten().for_each(check);
    drop(quit);
    other.join().unwrap();
}
