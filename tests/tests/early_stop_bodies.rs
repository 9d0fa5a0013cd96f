//! Early stop and kept graphs with bodies that do more than compute: whose destructors take gradients, and that run threads.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use replay_runtime::{BlockOptions, Rollout, RolloutReport};
use replay_tests::{MODES, Mode, Setup, bytes, randn};
use tch::{Kind, Tensor, nn};

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 }))
}

/// The gradient of two blocks in a row whose outputs the caller doubles in place.
fn train(mode: Mode, body: fn(&Tensor, &Tensor) -> Tensor) -> (Vec<u8>, RolloutReport) {
    let setup = setup();
    let w = &setup.model;
    let rollout = Rollout::builder(&setup.vs).keep_graphs(mode.keep).early_stop(mode.early_stop).build();
    let mut h = randn(3, &[5, 4], Kind::Float);
    for _ in 0..2 {
        let options = BlockOptions::new("step").early_stop(mode.marked);
        h = rollout.block_with(options, &[("h", &h)], move |_, inputs| body(&inputs[0], w)).unwrap();
        h = h.g_mul_scalar_(2.0);
    }
    let report = rollout.backward(&h.square().sum(Kind::Float)).unwrap();
    (bytes(&w.grad()), report)
}

/// Takes a gradient of its own when it is dropped.
struct Takes(Tensor);

impl Takes {
    fn of(w: &Tensor) -> Self {
        Self(w.detach().set_requires_grad(true))
    }
}

impl Drop for Takes {
    fn drop(&mut self) {
        let y = (&self.0 * &self.0).tanh().sum(Kind::Float);
        let grads = Tensor::run_backward(&[&y], &[&self.0], false, false);
        assert_eq!(grads[0].size(), self.0.size());
    }
}

/// A body that takes a gradient is begun again without a record.
#[test]
fn a_destructor_that_takes_a_gradient_while_the_body_begins_again() {
    let body = |x: &Tensor, w: &Tensor| {
        let _takes = Takes::of(w);
        let h = x.matmul(w);
        let y = h.tanh();
        let slope = Tensor::run_backward(&[&y.sum(Kind::Float)], &[&h], true, false);
        y * slope[0].detach()
    };
    let expected = train(MODES[0], body).0;
    for mode in MODES {
        assert!(train(mode, body).0 == expected, "{mode:?}");
    }
}

/// Tries to take one of what the body computed before.
struct Tries<'a> {
    loss: Tensor,
    of: Tensor,
    said: &'a RefCell<String>,
}

impl Drop for Tries<'_> {
    fn drop(&mut self) {
        if let Err(error) = Tensor::f_run_backward(&[&self.loss], &[&self.of], false, false) {
            let _ = self.said.replace(error.to_string());
        }
    }
}

#[test]
fn destructors_that_take_gradients_while_a_panic_goes_through() {
    for mode in MODES {
        let (setup, said) = (setup(), RefCell::default());
        let (w, said) = (&setup.model, &said);
        let rollout = Rollout::builder(&setup.vs).keep_graphs(mode.keep).early_stop(mode.early_stop).build();
        let x = randn(3, &[5, 4], Kind::Float);
        let options = BlockOptions::new("breaks").early_stop(mode.marked);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            rollout.block_with(options, &[("x", &x)], move |_, inputs| -> Tensor {
                let _takes = Takes::of(w);
                let loss = inputs[0].matmul(w).tanh().sum(Kind::Float);
                let _tries = Tries { loss, of: w.shallow_clone(), said };
                panic!("the pump broke")
            })
        }));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"the pump broke"));
        // Only there the tensors are gone already.
        let said = said.take();
        assert_eq!(
            said.contains("`breaks`") && said.contains("while it unwinds"),
            mode == MODES[1],
            "{mode:?}: {said}"
        );
        assert_eq!(said.is_empty(), mode != MODES[1], "{mode:?}: {said}");
    }
}

/// What operations on other threads save, no tape sees: such a block is replayed as one that is not recorded, and its outputs may be
/// changed in place.
#[test]
fn a_body_that_computes_on_another_thread() {
    let body = |x: &Tensor, w: &Tensor| {
        let (x, w) = (x.shallow_clone(), w.shallow_clone());
        std::thread::spawn(move || x.matmul(&w).tanh()).join().unwrap()
    };
    let expected = train(MODES[0], body).0;
    for mode in MODES {
        let (found, report) = train(mode, body);
        assert!(found == expected, "{mode:?}");
        assert_eq!((report.total.replays, report.total.stopped, report.total.kept), (2, 0, 0), "{mode:?}");
    }
}
