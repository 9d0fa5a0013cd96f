//! Guarantee *memory*, over many steps and many ends: whatever fails, and whatever is dropped first and on which
//! thread, nothing piles up.
//!
//! Closures are counted by what they capture, exactly. Tensors are measured as what the process holds resident, with
//! inputs so large that each lost one would show.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::Arc;
use std::thread;

use replay_runtime::{ReplayError, Rollout, is_replaying};
use replay_tests::{Setup, randn};
use tch::{Device, Kind, Tensor, nn};

/// Elements of a tensor of 1 MiB.
const LARGE: i64 = 1 << 18;

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[1], nn::Init::Const(1.5)))
}

fn large() -> Tensor {
    Tensor::ones([LARGE], (Kind::Float, Device::Cpu))
}

/// Resident memory of this process in MiB.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
    let pages: i64 = statm.split_whitespace().nth(1).expect("the second field").parse().expect("a number");
    pages * 4 / 1024
}

/// The ways in which a step can end.
const ENDS: usize = 10;

/// What fails in a body.
fn fault(end: usize, replay: bool) -> Result<(), &'static str> {
    match (end, replay) {
        (1, true) | (2, false) => Err("on purpose"),
        (3, true) | (4, false) => panic_any("on purpose"),
        _ => Ok(()),
    }
}

/// One step of three blocks, one inside another, that ends in one of the ways; the odd half of them fail.
fn step(setup: &Setup<Tensor>, witness: &Arc<()>, end: usize) -> Result<(), ReplayError> {
    let w = &setup.model;
    let rollout = Rollout::new(&setup.vs);
    let block = |name: &str, x: &Tensor, end: usize| {
        let held = Arc::clone(witness);
        rollout.block(name, &[("x", x), ("noise", &large())], move |rollout, i| {
            let inner = Arc::clone(&held);
            let h = rollout.block("inner", &[("x", &i[0])], move |_, i| {
                let _ = &inner;
                i[0].dropout(0.1, true) * w
            });
            fault(end, is_replaying())?;
            h.map(|h| (h * i[1].narrow(0, 0, 8)).tanh()).map_err(|_| "an inner block failed")
        })
    };
    let h = block("first", &Tensor::ones([8], (Kind::Float, Device::Cpu)), 0)?;
    let h = block("second", &h, end)?;
    let loss = block("third", &h, 0)?.mean(Kind::Float);
    match end {
        5 => drop((loss, rollout)),
        6 => drop((rollout, h, loss)),
        7 => drop(loss.f_backward().unwrap_err()),
        8 => drop(thread::spawn(move || drop((h, loss))).join()),
        9 => drop(Rollout::new(&setup.vs).backward(&loss).unwrap_err()),
        _ => drop(rollout.backward(&loss)?),
    }
    Ok(())
}

fn steps(setup: &Setup<Tensor>, count: usize) {
    let witness = Arc::new(());
    let (mut failed, mut panicked) = (0, 0);
    for end in 0..count {
        // Every second step ends well.
        let end = if end % 2 == 0 { 0 } else { 1 + end / 2 % (ENDS - 1) };
        match catch_unwind(AssertUnwindSafe(|| step(setup, &witness, end))) {
            Ok(Ok(())) => {}
            Ok(Err(_)) => failed += 1,
            Err(payload) => {
                assert_eq!(payload.downcast_ref::<&str>(), Some(&"on purpose"));
                panicked += 1;
            }
        }
        assert_eq!(Arc::strong_count(&witness), 1, "a closure is left, after a step that ended as {end}");
    }
    assert!(failed >= count / 20 && panicked >= count / 20, "{failed} and {panicked} of {count}");
}

/// A thousand steps, half of which fail in one of nine ways, of which each keeps 3 MiB while it lasts.
#[test]
fn a_thousand_steps_of_which_half_fail() {
    let setup = setup();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let grown = catch_unwind(AssertUnwindSafe(|| {
        steps(&setup, 200);
        let before = resident();
        steps(&setup, 1000);
        resident() - before
    }));
    std::panic::set_hook(hook);
    let grown = grown.expect("each step ends as it should");
    assert!(grown < 40, "grew by {grown} MiB");
}

/// One input of a thousand blocks is kept once; so is one that is passed twice to each, and one that requires grad.
#[test]
fn an_input_of_a_thousand_blocks_is_kept_once() {
    for requires_grad in [false, true] {
        let setup = setup();
        let w = &setup.model;
        let shared = large().set_requires_grad(requires_grad);
        let before = resident();
        let rollout = Rollout::new(&setup.vs);
        let mut h = Tensor::from(1f32);
        for _ in 0..1000 {
            let inputs = [("h", &h), ("shared", &shared), ("again", &shared)];
            h = rollout.block("step", &inputs, move |_, i| &i[0] * w * i[1].get(0) * i[2].get(1)).unwrap();
        }
        let grown = resident() - before;
        assert!(grown < 100, "grew by {grown} MiB, where a copy for each block would be 1000");
        let report = rollout.backward(&h.sum(Kind::Float)).unwrap();
        assert_eq!(report.total.bytes_saved, (1 << 20) + 4 * 1000);
    }
}

/// Views of one tensor are inputs of their own, on the storage of the one.
#[test]
fn a_thousand_views_of_one_input_share_its_storage() {
    let setup = setup();
    let w = &setup.model;
    let shared = large();
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let losses: Vec<_> = (0..1000)
        .map(|i| {
            let view = shared.narrow(0, i, LARGE - 1000);
            rollout.block("view", &[("view", &view)], move |_, i| i[0].get(0) * w).unwrap()
        })
        .collect();
    assert!(resident() - before < 100);
    rollout.backward(&Tensor::stack(&losses, 0).sum(Kind::Float)).unwrap();
}

/// A block with a large weight and a small input keeps the input's bytes, with and without offload.
#[test]
fn weights_are_not_kept() {
    for offload in [false, true] {
        let setup = Setup::new(|path| path.var("w", &[512, 512], nn::Init::Const(0.1)));
        let w = &setup.model;
        let x = randn(1, &[2, 512], Kind::Float);
        let rollout = Rollout::builder(&setup.vs).offload(offload).build();
        let y = rollout.block("wide", &[("x", &x)], |_, i| i[0].matmul(w)).unwrap();
        let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
        assert_eq!((report.total.bytes_saved, report.total.bytes_on_host), (2 * 512 * 4, 0));
    }
}

/// A block's body keeps two tensors of this size for its gradient.
const WIDE: i64 = 8 << 20;
const WIDE_MIB: i64 = 32;

/// Two branches of three blocks each: the graph of one block lives at a time, whichever branch it is in, and the order
/// is the same each time, the reverse of the forwards'.
#[test]
fn branches_are_replayed_one_block_at_a_time_and_in_order() {
    let setup = setup();
    let w = &setup.model;
    let (order, peak) = (RefCell::new(Vec::new()), Cell::new(0));
    for _ in 0..2 {
        order.borrow_mut().clear();
        let rollout = Rollout::new(&setup.vs);
        let block = |name: usize, h: &Tensor| {
            let (order, peak) = (&order, &peak);
            let body = move |_: &Rollout<'_>, i: &[Tensor]| {
                order.borrow_mut().push(name);
                let y = (&i[0].expand([WIDE], false) * w).square().abs().mean(Kind::Float);
                peak.set(peak.get().max(resident()));
                y
            };
            rollout.block("wide", &[("h", h)], body).unwrap()
        };
        let before = resident();
        peak.set(before);
        let (mut left, mut right) = (Tensor::from(0.5f32), Tensor::from(0.7f32));
        for step in 0..3 {
            left = block(2 * step, &left);
            right = block(2 * step + 1, &right);
        }
        rollout.backward(&(left * right)).unwrap();
        let grown = peak.get() - before;
        assert!(2 * grown > 3 * WIDE_MIB && 2 * grown < 7 * WIDE_MIB, "{grown} MiB at the peak");
        assert_eq!(*order.borrow(), [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]);
    }
}

/// Rollout, loss, output and input, in all orders, the tensors here or on another thread. The model must be last: what
/// the compiler says otherwise is in `ui/fail`.
#[test]
fn everything_is_dropped_in_every_order() {
    let witness = Arc::new(());
    let mut orders = 0;
    for order in permutations(4) {
        for elsewhere in [false, true] {
            let setup = setup();
            let held = Arc::clone(&witness);
            let input = large().set_requires_grad(true);
            let w = setup.model.shallow_clone();
            let rollout = Rollout::new(&setup.vs);
            let output = rollout.block("held", &[("x", &input)], move |_, i| {
                let _ = &held;
                &i[0] * &w
            });
            let output = output.unwrap();
            let mut tensors = [Some(output.mean(Kind::Float)), Some(output), Some(input)];
            let mut rollout = Some(rollout);
            for which in &order {
                match (tensors.get_mut(*which).map(Option::take), elsewhere) {
                    (None, _) => drop(rollout.take()),
                    (Some(tensor), false) => drop(tensor),
                    (Some(tensor), true) => thread::spawn(move || drop(tensor)).join().unwrap(),
                }
            }
            drop(rollout);
            drop(setup);
            assert_eq!(Arc::strong_count(&witness), 1, "{order:?}");
            orders += 1;
        }
    }
    assert_eq!(orders, 48);
}

fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(n - 1);
    shorter.iter().flat_map(|p| (0..n).map(move |at| [&p[..at], &[n - 1], &p[at..]].concat())).collect()
}

/// What the variables were is noted once as long as they do not change: 1000 of them here, which would be about 20 MiB if
/// each of 300 blocks noted them.
#[test]
fn variables_are_noted_once_for_many_blocks() {
    let setup = Setup::new(|path| (0..1000).map(|i| path.ones(&format!("w{i}"), &[1])).collect::<Vec<_>>());
    let model = &setup.model;
    let before = resident();
    let rollout = Rollout::new(&setup.vs);
    let mut h = Tensor::from(1f32);
    for weight in &model[..300] {
        h = rollout.block("step", &[("h", &h)], move |_, inputs| &inputs[0] * weight).unwrap();
    }
    let grown = resident() - before;
    assert!(grown < 12, "grew by {grown} MiB");
    rollout.backward(&h.sum(Kind::Float)).unwrap();
}
