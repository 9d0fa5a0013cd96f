//! Guarantee *failure*, where the body itself succeeds and its block is refused afterwards, and for leaves around the blocks.

use replay_runtime::{BlockOptions, ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn draw() -> Tensor {
    Tensor::rand([4], CPU)
}

fn setup() -> Setup<(Tensor, Tensor)> {
    Setup::new(|path| (path.randn_standard("w", &[6]), path.ones_no_train("mean", &[6])))
}

/// Runs a block that draws and is then refused, and demands that the generator stands where it stood.
fn refused<'m>(
    setup: &'m Setup<(Tensor, Tensor)>,
    body: impl Fn(&(Tensor, Tensor), &Tensor) -> Tensor + 'm,
) -> ReplayError {
    let x = randn(1, &[6], Kind::Float);
    tch::manual_seed(4);
    let expected = draw();
    tch::manual_seed(4);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("refused", &[("x", &x)], move |_, i| body(&setup.model, &i[0].dropout(0.5, true)));
    let error = y.unwrap_err();
    assert!(same_bits(&expected, &draw()), "{error}: the generator was not put back");
    error
}

#[test]
fn a_block_that_is_refused_after_its_body_puts_the_generator_back() {
    let setup = setup();
    let history = setup.model.0.exp();
    let error = refused(&setup, |_, _| Tensor::new());
    assert!(matches!(error, ReplayError::UndefinedOutput { .. }), "{error}");
    let error = refused(&setup, |(w, mean), i| {
        let _ = mean.shallow_clone().g_add_scalar_(1.0);
        i * w
    });
    assert!(matches!(error, ReplayError::BufferWritten { .. }), "{error}");
    let error = refused(&setup, move |_, i| i * &history);
    assert!(matches!(error, ReplayError::Captured { .. }), "{error}");
    assert!(same_bits(&setup.model.1, &setup.model.1.ones_like()), "the buffer was not put back");
}

/// The last thing that is refused, and the buffers are put back for it too.
#[test]
fn a_block_that_may_not_draw_puts_buffers_and_generator_back() {
    let setup = setup();
    let (w, mean) = &setup.model;
    let x = randn(1, &[6], Kind::Float);
    tch::manual_seed(4);
    let expected = draw();
    tch::manual_seed(4);
    let rollout = Rollout::builder(&setup.vs).preserve_rng_state(false).build();
    let y = rollout.block_with(BlockOptions::new("draws").buffers(true), &[("x", &x)], |_, i| {
        let _ = mean.shallow_clone().g_add_scalar_(1.0);
        i[0].dropout(0.5, true) * w
    });
    let error = y.unwrap_err();
    assert!(matches!(error, ReplayError::RandomWithoutState { .. }), "{error}");
    assert!(same_bits(&expected, &draw()), "the generator was not put back");
    assert!(same_bits(mean, &mean.ones_like()), "the buffer was not put back");
}

/// A leaf of no store that the caller's own graph reads, and which has its gradient when the block fails.
#[test]
fn a_leaf_around_the_blocks_gets_its_gradient_back() {
    for old in [false, true] {
        let setup = setup();
        let w = &setup.model.0;
        let around = randn(3, &[6], Kind::Float).set_requires_grad(true);
        if old {
            (&around * 2.0).sum(Kind::Float).backward();
        }
        let rollout = Rollout::new(&setup.vs);
        let h = rollout.block("fails", &[("x", &randn(1, &[6], Kind::Float))], |_, i| {
            if is_replaying() { Err("as asked") } else { Ok(&i[0] * w) }
        });
        rollout.backward(&(h.unwrap() * &around).sum(Kind::Float)).unwrap_err();
        assert_eq!(around.grad().defined(), old);
        assert!(!old || same_bits(&around.grad(), &around.full_like(2.0)));
    }
}

/// The replayed rollout of another thread of this process may be over: nothing is left for the next of the same variables.
#[test]
fn a_failure_is_over_when_it_is_told() {
    let setup = setup();
    let (w, _) = &setup.model;
    let x = randn(1, &[6], Kind::Float);
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.block("fails", &[("x", &x)], |_, i| if is_replaying() { Err("as asked") } else { Ok(&i[0] * w) });
    rollout.backward(&y.unwrap().sum(Kind::Float)).unwrap_err();
    let vs: &nn::VarStore = &setup.vs;
    let trained = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let (w, x) = (&vs.variables()["w"], Tensor::ones([6], CPU));
            let rollout = Rollout::new(vs);
            let y = rollout.block("step", &[("x", &x)], |_, i| &i[0] * w).unwrap();
            rollout.backward(&y.sum(Kind::Float)).is_ok()
        });
        other.join().unwrap()
    });
    assert!(trained);
}
