//! Batch normalisation in train mode, whose kernel writes the statistics without a new version.

use replay_runtime::{BlockOptions, ReplayError, Rollout, replay_block};
use replay_tests::{Setup, randn, same_bits};
use tch::nn::{Module, ModuleT};
use tch::{Kind, Tensor, nn};

struct Net {
    linear: nn::Linear,
    norm: nn::BatchNorm,
}

fn net(path: &nn::Path<'_>) -> Net {
    Net {
        linear: nn::linear(path / "linear", 6, 6, nn::LinearConfig::default()),
        norm: nn::batch_norm1d(path / "norm", 6, nn::BatchNormConfig::default()),
    }
}

impl Net {
    fn step(&self, x: &Tensor) -> Tensor {
        self.norm.forward_t(&self.linear.forward(x), true).tanh()
    }

    #[replay_block(buffers)]
    fn block(&self, x: &Tensor) -> Tensor {
        self.step(x)
    }

    #[replay_block(buffers)]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        let h = self.block_replay(rollout, &(x * 0.5))?;
        self.block_replay(rollout, &h).map(|h| self.norm.forward_t(&h, true))
    }

    fn statistics(&self) -> [Tensor; 2] {
        [self.norm.running_mean.copy(), self.norm.running_var.copy()]
    }
}

fn x() -> Tensor {
    randn(2, &[5, 6], Kind::Float)
}

fn assert_same(a: &[Tensor; 2], b: &[Tensor; 2]) {
    assert!(same_bits(&a[0], &b[0]) && same_bits(&a[1], &b[1]), "statistics differ: {a:?} {b:?}");
}

/// Gradients and statistics after a program, plain or replayed.
fn outcome(program: impl FnOnce(&Setup<Net>)) -> (Vec<Option<Tensor>>, [Tensor; 2]) {
    let setup = Setup::new(net);
    program(&setup);
    (setup.grads().into_values().collect(), setup.model.statistics())
}

fn assert_like_plain(plain: impl FnOnce(&Setup<Net>), replayed: impl FnOnce(&Setup<Net>)) {
    let (expected, found) = (outcome(plain), outcome(replayed));
    assert_same(&expected.1, &found.1);
    assert_eq!(expected.0.len(), found.0.len());
    for (a, b) in expected.0.iter().zip(&found.0) {
        match (a, b) {
            (None, None) => {}
            (Some(a), Some(b)) => assert!(same_bits(a, b), "{a} {b}"),
            _ => panic!("a gradient is missing"),
        }
    }
}

#[test]
fn statistics_are_updated_once() {
    assert_like_plain(
        |s| s.model.step(&s.model.step(&s.model.step(&x()))).square().sum(Kind::Float).backward(),
        |s| {
            let rollout = Rollout::new(&s.vs);
            let mut h = x();
            for _ in 0..3 {
                h = s.model.block_replay(&rollout, &h).unwrap();
            }
            rollout.backward(&h.square().sum(Kind::Float)).unwrap();
        },
    );
}

#[test]
fn forwards_without_a_backward_count_too() {
    assert_like_plain(
        |s| drop(s.model.step(&s.model.step(&x()))),
        |s| {
            let rollout = Rollout::new(&s.vs);
            let h = s.model.block_replay(&rollout, &x()).unwrap();
            drop(s.model.block_replay(&rollout, &h).unwrap());
        },
    );
    // One of two forwards is differentiated.
    assert_like_plain(
        |s| {
            s.model.step(&x()).square().sum(Kind::Float).backward();
            drop(s.model.step(&x()));
        },
        |s| {
            let rollout = Rollout::new(&s.vs);
            let loss = s.model.block_replay(&rollout, &x()).unwrap().square().sum(Kind::Float);
            drop(s.model.block_replay(&rollout, &x()).unwrap());
            rollout.backward(&loss).unwrap();
        },
    );
    // And under no_grad, where a block is a plain call.
    assert_like_plain(
        |s| drop(s.model.step(&x())),
        |s| tch::no_grad(|| drop(s.model.block_replay(&Rollout::new(&s.vs), &x()).unwrap())),
    );
}

#[test]
fn closures_say_so_by_their_options() {
    assert_like_plain(
        |s| s.model.step(&s.model.step(&x())).sum(Kind::Float).backward(),
        |s| {
            let rollout = Rollout::new(&s.vs);
            let mut h = x();
            for _ in 0..2 {
                let options = BlockOptions::new("step").buffers(true);
                h = rollout.block_with(options, &[("x", &h)], |_, i| s.model.step(&i[0])).unwrap();
            }
            rollout.backward(&h.sum(Kind::Float)).unwrap();
        },
    );
}

#[test]
fn nested_blocks_update_once_too() {
    let plain = |s: &Setup<Net>| {
        let mut h = x();
        for _ in 0..2 {
            h = s.model.norm.forward_t(&s.model.step(&s.model.step(&(h * 0.5))), true);
        }
        h.square().sum(Kind::Float)
    };
    let expected = outcome(|s| plain(s).backward());
    let found = outcome(|s| {
        let rollout = Rollout::new(&s.vs);
        let mut h = x();
        for _ in 0..2 {
            h = s.model.outer_replay(&rollout, &h).unwrap();
        }
        rollout.backward(&h.square().sum(Kind::Float)).unwrap();
    });
    assert_same(&expected.1, &found.1);
    // The weight of the norm is used inside and outside of the inner blocks, so sums associate otherwise.
    for (a, b) in expected.0.iter().flatten().zip(found.0.iter().flatten()) {
        let difference = (a - b).abs().max().double_value(&[]);
        assert!(difference <= 1e-5 * a.abs().max().double_value(&[]).max(1.0), "{a} {b}");
    }
}

/// In eval mode the kernel keeps the statistics themselves for its derivative, so they must stay put back until the
/// block is differentiated.
#[test]
fn statistics_stay_put_back_until_the_block_is_differentiated() {
    let setup = Setup::new(net);
    let model = &setup.model;
    let expected = {
        let y = model.norm.forward_t(&model.linear.forward(&x()), false);
        Tensor::run_backward(&[y.square().sum(Kind::Float)], &[&model.linear.ws], false, false).remove(0)
    };
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("eval", &[("x", &x())], |_, i| model.norm.forward_t(&model.linear.forward(&i[0]), false));
    let loss = y.unwrap().square().sum(Kind::Float);
    let unused = model.block_replay(&rollout, &x()).unwrap();
    let statistics = model.statistics();
    rollout.backward(&loss).unwrap();
    assert!(same_bits(&expected, &model.linear.ws.grad()));
    assert_same(&statistics, &model.statistics());
    drop(unused);
}
