//! A program for whichever way panics end in it: `cargo xtask soak` builds it with `panic = "abort"` too, where nothing may
//! unwind. Marked blocks then run to their ends, and their gradients are the same.

use std::cell::Cell;

use replay_runtime::{BlockOptions, Keep, ReplayError, Rollout, is_replaying};
use tch::{Device, Kind, Tensor, nn};

const UNWINDS: bool = cfg!(panic = "unwind");

fn setup() -> (nn::VarStore, Tensor, Tensor) {
    tch::set_num_threads(1);
    tch::manual_seed(7);
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 });
    (vs, w, Tensor::randn([5, 4], (Kind::Float, Device::Cpu)))
}

/// Draws and saves, and ends with an operation that saves nothing.
fn step(x: &Tensor, w: &Tensor) -> Tensor {
    x + x.matmul(w).dropout(0.5, true).gelu("none")
}

/// A force, which is a gradient taken inside; a recorded body begins again then.
fn with_gradient_inside(x: &Tensor, w: &Tensor) -> Tensor {
    let place = x.detach().set_requires_grad(true);
    let force = Tensor::run_backward(&[place.square().sum(Kind::Float)], &[&place], false, false).remove(0);
    x.matmul(w).tanh() + force
}

/// Three blocks; `stops` says whether their replays end early, where panics unwind.
fn gradient(body: fn(&Tensor, &Tensor) -> Tensor, keep: Keep, stops: bool) {
    let (_plain, w, x) = setup();
    (0..3).fold(x.shallow_clone(), |x, _| body(&x, &w)).square().sum(Kind::Float).backward();
    let expected = w.grad();

    let (vs, w, x) = setup();
    let (begun, ended) = (Cell::new(0), Cell::new(0));
    let rollout = Rollout::builder(&vs).keep_graphs(keep).build();
    let block = |x: &Tensor| {
        let options = BlockOptions::new("step").early_stop(true);
        let (begun, ended, w) = (&begun, &ended, &w);
        rollout.block_with(options, &[("x", x)], move |_, i| {
            begun.set(begun.get() + 1);
            let y = body(&i[0], w);
            ended.set(ended.get() + 1);
            y
        })
    };
    let loss = (0..3).fold(x, |x, _| block(&x).expect("the body does not fail")).square().sum(Kind::Float);
    let report = rollout.backward(&loss).expect("nothing fails");
    assert_eq!(w.grad(), expected);
    let stopped = if UNWINDS && stops { report.total.replays } else { 0 };
    assert_eq!(report.total.stopped, stopped, "{report}");
    assert!(UNWINDS || begun.get() == ended.get(), "a body was ended");
    println!("{} bodies, {} of them to their ends, {} graphs kept", begun.get(), ended.get(), report.total.kept);
}

fn error_in_a_replay() {
    let (vs, w, x) = setup();
    let rollout = Rollout::new(&vs);
    let options = BlockOptions::new("step").early_stop(true);
    let body = |_: &Rollout<'_>, i: &[Tensor]| if is_replaying() { Err("dry") } else { Ok(step(&i[0], &w)) };
    let y = rollout.block_with(options, &[("x", &x)], body).expect("the forward is well");
    let error = rollout.backward(&y.sum(Kind::Float)).expect_err("its replay is not");
    assert!(matches!(&error, ReplayError::Block { block, .. } if block == "step"), "{error}");
    assert!(!w.grad().defined());
}

fn main() {
    println!("panics {}", if UNWINDS { "unwind" } else { "abort" });
    for keep in [Keep::None, Keep::Last(1)] {
        gradient(step, keep, true);
        gradient(with_gradient_inside, keep, false);
    }
    error_in_a_replay();
    println!("all gradients equal plain autograd's");
}
