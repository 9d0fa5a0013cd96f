//! Graphs of a forward that are used again read the buffers as that forward left them, wherever the replay that fills them
//! ends.

use replay_runtime::{BlockOptions, Rollout};
use replay_tests::{MODES, Mode, Setup, bytes, randn};
use tch::nn::ModuleT;
use tch::{Kind, Tensor, nn};

struct Net {
    w: Tensor,
    codes: Tensor,
    norm: nn::BatchNorm,
}

fn setup() -> Setup<Net> {
    Setup::new(|path| Net {
        w: path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 }),
        codes: path.ones_no_train("codes", &[4]),
        norm: nn::batch_norm1d(path / "norm", 4, nn::BatchNormConfig::default()),
    })
}

type Step = fn(&Net, &Tensor) -> Tensor;

/// The bits of loss, gradient and buffers, and whether replays were ended.
fn train(mode: Mode, step: Step) -> (Vec<Vec<u8>>, bool) {
    let setup = setup();
    let model = &setup.model;
    let rollout = Rollout::builder(&setup.vs).keep_graphs(mode.keep).early_stop(mode.early_stop).build();
    let mut h = randn(3, &[6, 4], Kind::Float);
    for _ in 0..4 {
        let options = BlockOptions::new("step").buffers(true).early_stop(mode.marked);
        h = rollout.block_with(options, &[("h", &h)], move |_, inputs| step(model, &inputs[0])).unwrap();
    }
    let loss = h.square().sum(Kind::Float);
    let stopped = rollout.backward(&loss).unwrap().total.stopped;
    let left = [&model.codes, &model.norm.running_mean, &model.norm.running_var];
    let seen = [&loss, &model.w.grad()].into_iter().chain(left).map(bytes).collect();
    (seen, stopped > 0)
}

fn write(codes: &Tensor, values: &Tensor) {
    tch::no_grad(|| codes.shallow_clone().copy_(values));
}

/// The last tensor that a replay has to bring comes before the write.
fn between(net: &Net, x: &Tensor) -> Tensor {
    let h = x.matmul(&net.w).tanh();
    write(&net.codes, &(&net.codes * 0.9 + h.detach().mean_dim(0, false, Kind::Float) * 0.1));
    h * &net.codes
}

/// The step is plain calls of this one.
fn between_without_a_buffer(net: &Net, codes: &Tensor, x: &Tensor) -> [Tensor; 2] {
    let h = x.matmul(&net.w).tanh();
    let codes = codes * 0.9 + h.detach().mean_dim(0, false, Kind::Float) * 0.1;
    [h * &codes, codes.detach()]
}

#[test]
fn a_write_behind_the_last_saved_tensor() {
    let plain = setup();
    let (mut h, mut codes) = (randn(3, &[6, 4], Kind::Float), plain.model.codes.shallow_clone());
    for _ in 0..4 {
        [h, codes] = between_without_a_buffer(&plain.model, &codes, &h);
    }
    let loss = h.square().sum(Kind::Float);
    loss.backward();
    let expected = [&loss, &plain.model.w.grad(), &codes].map(bytes);
    for mode in MODES {
        let (found, stopped) = train(mode, between);
        assert!(found[..3] == expected, "{mode:?}");
        assert_eq!(stopped, mode.marked, "{mode:?}");
    }
}

/// What a mode may not change: the same values written again, versions alone; several writes; writes by kernels that raise no
/// version, into what was saved before them.
#[test]
fn all_modes_read_the_same() {
    let steps: [(&str, Step); 6] = [
        ("the same values", |net, x| {
            write(&net.codes, &Tensor::from_slice(&[0.5f32, 2.0, 1.0, 0.25]));
            (x.matmul(&net.w) * &net.codes).tanh()
        }),
        ("the same values at last", |net, x| {
            let h = x.matmul(&net.w).tanh();
            write(&net.codes, &Tensor::from_slice(&[0.5f32, 2.0, 1.0, 0.25]));
            h * &net.codes
        }),
        ("several writes", |net, x| {
            write(&net.codes, &(&net.codes * 0.9));
            let h = x.matmul(&net.w).tanh();
            write(&net.codes, &(&net.codes * 0.9));
            write(&net.codes, &(&net.codes + 0.1));
            h * &net.codes
        }),
        ("a write that nothing reads", |net, x| {
            let h = x.matmul(&net.w).tanh();
            write(&net.codes, &(&net.codes * 0.9));
            h
        }),
        ("no tensor to bring", |net, x| {
            write(&net.codes, &(&net.codes * 0.9));
            x * &net.codes + net.w.narrow(0, 0, 1)
        }),
        ("statistics", |net, x| {
            let h = net.norm.forward_t(&x.matmul(&net.w), false);
            tch::no_grad(|| drop(net.norm.forward_t(&h, true)));
            h
        }),
    ];
    for (name, step) in steps {
        let (expected, _) = train(MODES[0], step);
        for mode in MODES {
            assert!(train(mode, step).0 == expected, "{name}: {mode:?}");
        }
    }
}
