//! Kept graphs: the newest blocks inside a budget need no replay, and nothing else changes.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use replay_runtime::{BlockOptions, Chain, EarlyStop, Keep, ReplayError, Rollout, RolloutReport, is_replaying};
use replay_tests::{Setup, bytes, randn};
use tch::{Device, Kind, Tensor, nn};

fn setup() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 0.5 }))
}

/// Six blocks in a row that draw; which of them were replayed, oldest first, and the report.
fn six(keep: Keep, early_stop: bool) -> (Vec<usize>, RolloutReport) {
    let x = randn(3, &[5, 4], Kind::Float);
    let step = |h: &Tensor, w: &Tensor| h + h.matmul(w).dropout(0.5, true).gelu("none") * 0.1;
    let plain = setup();
    tch::manual_seed(5);
    let expected = (0..6).fold(x.shallow_clone(), |h, _| step(&h, &plain.model)).square().sum(Kind::Float);
    expected.backward();

    let setup = setup();
    let (w, replayed) = (&setup.model, RefCell::new(Vec::new()));
    let rollout = Rollout::builder(&setup.vs).keep_graphs(keep).build();
    tch::manual_seed(5);
    let (mut h, replayed_by) = (x, &replayed);
    for i in 0..6 {
        let options = BlockOptions::new("step").early_stop(early_stop);
        let body = move |_: &Rollout<'_>, inputs: &[Tensor]| {
            if is_replaying() {
                replayed_by.borrow_mut().push(i);
            }
            step(&inputs[0], w)
        };
        h = rollout.block_with(options, &[("h", &h)], body).unwrap();
    }
    let report = rollout.backward(&h.square().sum(Kind::Float)).unwrap();
    assert_eq!(bytes(&plain.model.grad()), bytes(&setup.model.grad()), "{keep:?}");
    replayed.borrow_mut().reverse();
    (replayed.take(), report)
}

/// What each block of `six` saves that is neither an input nor the weight, in bytes: the factors of dropout and the input of
/// gelu, 20 numbers each.
const PER_BLOCK: u64 = 2 * 20 * 4;

#[test]
fn the_last_ones_need_no_replay() {
    for early_stop in [false, true] {
        for (keep, expected) in [
            (Keep::None, 0),
            (Keep::Last(0), 0),
            (Keep::Last(1), 1),
            (Keep::Last(4), 4),
            (Keep::Last(100), 6),
            (Keep::Bytes(0), 0),
            (Keep::Bytes(PER_BLOCK - 1), 0),
            (Keep::Bytes(PER_BLOCK), 1),
            (Keep::Bytes(3 * PER_BLOCK - 1), 2),
            (Keep::Bytes(3 * PER_BLOCK), 3),
            (Keep::Bytes(u64::MAX), 6),
        ] {
            let (replayed, report) = six(keep, early_stop);
            assert_eq!(replayed, (0..6 - expected).collect::<Vec<_>>(), "{keep:?}");
            let kept = u64::try_from(expected).unwrap();
            assert_eq!((report.total.kept, report.total.bytes_kept), (kept, kept * PER_BLOCK), "{keep:?}");
            assert_eq!(report.total.stopped, if early_stop { 6 - kept } else { 0 });
        }
    }
}

/// States that a chain does not save are what the graph that saves them costs.
#[test]
fn states_without_a_slot_count() {
    let setup = setup();
    let w = &setup.model;
    let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Bytes(u64::MAX)).build();
    let x = randn(3, &[5, 4], Kind::Float);
    let last = rollout.chain(Chain::new("step", 4).slots(1), &[("x", &x)], |_, _, states| states[0].matmul(w));
    let report = rollout.backward(&last.unwrap().sum(Kind::Float)).unwrap();
    // The first and the last step's are saved anyway.
    assert_eq!((report.total.kept, report.total.bytes_kept, report.total.bytes_saved), (4, 2 * 20 * 4, 2 * 20 * 4));
}

/// Views and expanded tensors hold their storage once; the input and the weight cost nothing.
#[test]
fn bytes_are_those_of_storages_each_once() {
    let saved = |body: fn(&Tensor, &Tensor) -> Tensor| {
        let setup = setup();
        let w = &setup.model;
        let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Last(1)).build();
        let x = randn(3, &[4, 4], Kind::Float).set_requires_grad(true);
        let y = rollout.block("saves", &[("x", &x)], |_, i| body(&i[0], w).sum(Kind::Float)).unwrap();
        rollout.backward(&y).unwrap().total.bytes_kept
    };
    assert_eq!(saved(|x, w| x * w), 0);
    assert_eq!(saved(|x, w| x.tr().matmul(&w.tr())), 0);
    assert_eq!(saved(|x, w| (x * w).exp()), 64);
    // `exp` saves its result, the product both of its factors: one storage.
    assert_eq!(saved(|x, w| (x * w).exp() * w), 64);
    let views = |x: &Tensor, w: &Tensor| {
        let h = (x * w).exp();
        h.narrow(0, 0, 1) * h.narrow(0, 1, 1) * h.tr().narrow(1, 2, 1).tr()
    };
    assert_eq!(saved(views), 64 + 16);
    assert_eq!(saved(|x, w| (x.sum(Kind::Float) * w.sum(Kind::Float)).exp().expand([4, 4], false) * w), 3 * 4);
}

/// A block around others is replayed; those inside it, in its replay, are the newest.
#[test]
fn a_block_around_blocks_is_not_kept() {
    let setup = setup();
    let w = &setup.model;
    let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Last(1)).build();
    let x = randn(3, &[5, 4], Kind::Float);
    let y = rollout.block("outer", &[("x", &x)], |rollout, i| {
        let h = rollout.block("inner", &[("x", &i[0])], |_, i| i[0].matmul(w).tanh())?;
        rollout.block("inner", &[("x", &h)], |_, i| i[0].matmul(w).tanh())
    });
    let y: Tensor = y.unwrap();
    let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
    let counts = |name: &str| {
        let (_, block) = report.blocks.iter().find(|(block, _)| block == name).unwrap();
        (block.replays, block.kept)
    };
    assert_eq!((counts("outer"), counts("inner")), ((1, 0), (1, 1)));
}

/// Plain autograd forbids it where the graph needs the output; a replay makes it anew.
#[test]
fn an_output_that_the_caller_changes_in_place() {
    let setup = setup();
    let w = &setup.model;
    let run = |keep| {
        let rollout = Rollout::builder(&setup.vs).keep_graphs(keep).build();
        let x = randn(3, &[5, 4], Kind::Float);
        let mut y = rollout.block("exp", &[("x", &x)], |_, i| i[0].matmul(w).exp()).unwrap();
        let _ = y.g_mul_scalar_(2.0);
        let report = rollout.backward(&y.sum(Kind::Float)).unwrap();
        let grad = w.grad().copy();
        setup.model.shallow_clone().zero_grad();
        (report.total.replays, bytes(&grad))
    };
    assert_eq!(run(Keep::Last(1)), run(Keep::None));
}

/// As with graphs that are not kept: the gradient of both.
#[test]
fn what_a_body_leaves_aside_is_differentiated_too() {
    let forms: [fn(&Tensor) -> Tensor; 2] = [|h| h.square().sum(Kind::Float), |h| h.sum(Kind::Float)];
    for form in forms {
        let run = |keep| {
            let setup = setup();
            let (w, aside) = (&setup.model, RefCell::new(Tensor::new()));
            let rollout = Rollout::builder(&setup.vs).keep_graphs(keep).build();
            let x = randn(3, &[5, 4], Kind::Float);
            let y = rollout.block("leaves", &[("x", &x)], |_, i| {
                let h = i[0].matmul(w).tanh();
                if !is_replaying() {
                    let _ = aside.replace(form(&h));
                }
                h.exp().sum(Kind::Float)
            });
            let report = rollout.backward(&(y.unwrap() + aside.take())).unwrap();
            (report.total.replays, bytes(&setup.model.grad()))
        };
        assert_eq!(run(Keep::Last(1)), run(Keep::None));
    }
}

/// Blocks that make no node, before and after one that leaves something aside, are not taken for it.
#[test]
fn blocks_without_a_node_are_told_from_their_neighbours() {
    let run = |keep| {
        let setup = setup();
        let (w, aside) = (&setup.model, RefCell::new(Tensor::new()));
        let rollout = Rollout::builder(&setup.vs).keep_graphs(keep).build();
        let returns = |name: &str, x: &Tensor| rollout.block(name, &[("x", x)], |_, i| i[0].shallow_clone()).unwrap();
        let z = returns("first", &returns("before", &randn(4, &[5, 4], Kind::Float).set_requires_grad(true)));
        let x = randn(3, &[5, 4], Kind::Float);
        let y = rollout.block("leaves", &[("x", &x)], |_, i| {
            let h = i[0].matmul(w).tanh();
            if !is_replaying() {
                let _ = aside.replace(h.square().sum(Kind::Float));
            }
            h.exp()
        });
        let y = (returns("last", &returns("after", &y.unwrap())) * z).sum(Kind::Float);
        let report = rollout.backward(&(y + aside.take())).unwrap();
        let replays = report.blocks.iter().find(|(name, _)| name == "leaves").map(|(_, block)| block.replays);
        (replays, bytes(&setup.model.grad()))
    };
    assert_eq!(run(Keep::Bytes(u64::MAX)), run(Keep::None));
}

/// A pass of another thread comes to the block's leaf while the block is differentiated.
#[test]
fn a_foreign_pass_at_the_same_time_is_an_error_and_takes_nothing() {
    let run = |keep, foreign: bool| {
        let setup = setup();
        let (w, aside) = (&setup.model, RefCell::new(Tensor::new()));
        let rollout = Rollout::builder(&setup.vs).keep_graphs(keep).build();
        let x = randn(3, &[5, 4], Kind::Float).set_requires_grad(true);
        let y = rollout.block("leaves", &[("x", &x)], |_, i| {
            let _ = aside.replace((&i[0] * 2.0).sum(Kind::Float));
            (0..2000).fold(i[0].shallow_clone(), |h, _| h.tanh()).matmul(w)
        });
        let loss = y.unwrap().sum(Kind::Float);
        let (aside, over, passes) = (aside.take(), AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let (over, passes) = (&over, &passes);
            if foreign {
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let error = aside.f_backward().unwrap_err().to_string();
                        assert!(error.contains("`leaves`"), "{error}");
                        passes.fetch_add(1, Ordering::Relaxed);
                    }
                });
                while passes.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
            }
            rollout.backward(&loss).unwrap();
            over.store(true, Ordering::Relaxed);
        });
        assert!(passes.into_inner() > 1 || !foreign);
        (bytes(&x.grad()), bytes(&w.grad()))
    };
    assert_eq!(run(Keep::Last(1), true), run(Keep::None, false));
}

/// Another pass has used the kept graph up: the block is replayed.
#[test]
fn a_foreign_pass_through_what_was_left_aside() {
    let run = |keep| {
        let setup = setup();
        let (w, aside) = (&setup.model, RefCell::new(Tensor::new()));
        let rollout = Rollout::builder(&setup.vs).keep_graphs(keep).build();
        let x = randn(3, &[5, 4], Kind::Float);
        let y = rollout.block("leaves", &[("x", &x)], |_, i| {
            let h = i[0].matmul(w).tanh();
            if !is_replaying() {
                let _ = aside.replace(h.square().sum(Kind::Float));
            }
            h.exp().sum(Kind::Float)
        });
        aside.take().backward();
        let report = rollout.backward(&y.unwrap()).unwrap();
        (report.total.replays, bytes(&setup.model.grad()))
    };
    assert_eq!(run(Keep::Last(1)), run(Keep::None));
}

#[test]
fn a_variable_that_changes_is_an_error_all_the_same() {
    let setup = setup();
    let w = &setup.model;
    let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Last(1)).build();
    let x = randn(3, &[5, 4], Kind::Float);
    let y = rollout.block("step", &[("x", &x)], |_, i| i[0].matmul(w).tanh()).unwrap();
    tch::no_grad(|| drop(w.shallow_clone().g_add_scalar_(1.0)));
    let error = rollout.backward(&y.sum(Kind::Float)).unwrap_err();
    assert!(matches!(&error, ReplayError::VariableChanged { variable, .. } if variable == "w"), "{error}");
    assert!(!setup.model.grad().defined());
}

/// Buffers of a kept block are put back for its gradient, and come again.
#[test]
fn statistics_are_updated_once() {
    let run = |keep| {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root(), 4, nn::BatchNormConfig::default());
        let rollout = Rollout::builder(&vs).keep_graphs(keep).build();
        let mut h = randn(3, &[5, 4], Kind::Float);
        for _ in 0..3 {
            let options = BlockOptions::new("norm").buffers(true);
            h = rollout
                .block_with(options, &[("h", &h)], |_, i| nn::ModuleT::forward_t(&norm, &i[0], true).tanh())
                .unwrap();
        }
        let kept = rollout.backward(&h.square().sum(Kind::Float)).unwrap().total.kept;
        let mut state: Vec<_> = vs.variables().into_iter().collect();
        state.sort_by(|a, b| a.0.cmp(&b.0));
        let bits = |(_, t): &(String, Tensor)| (bytes(t), t.grad().defined().then(|| bytes(&t.grad())));
        (kept, state.iter().map(bits).collect::<Vec<_>>())
    };
    let (none, expected) = run(Keep::None);
    for (keep, count) in [(Keep::Last(1), 1), (Keep::Last(2), 2), (Keep::Bytes(u64::MAX), 3)] {
        let (kept, found) = run(keep);
        assert_eq!((none, kept), (0, count));
        assert!(found == expected, "{keep:?}");
    }
}

/// Statistics that a block reads after it has updated them: those of a kept graph are the updated ones.
#[test]
fn statistics_that_a_block_reads_after_it_has_updated_them() {
    let run = |keep, early_stop| {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root(), 4, nn::BatchNormConfig::default());
        let rollout = Rollout::builder(&vs).keep_graphs(keep).build();
        let x = (randn(3, &[5, 4], Kind::Float) * 3.0).set_requires_grad(true);
        let mut h = x.shallow_clone();
        for _ in 0..2 {
            let options = BlockOptions::new("norm").buffers(true).early_stop(early_stop);
            let body = |_: &Rollout<'_>, i: &[Tensor]| {
                tch::no_grad(|| drop(nn::ModuleT::forward_t(&norm, &i[0], true)));
                nn::ModuleT::forward_t(&norm, &i[0], false).tanh()
            };
            h = rollout.block_with(options, &[("h", &h)], body).unwrap();
        }
        rollout.backward(&h.sum(Kind::Float)).unwrap();
        bytes(&x.grad())
    };
    let expected = run(Keep::None, false);
    for (keep, early_stop) in
        [(Keep::Last(1), false), (Keep::Last(2), false), (Keep::None, true), (Keep::Last(1), true)]
    {
        assert!(run(keep, early_stop) == expected, "{keep:?}, {early_stop}");
    }
}

/// A failure in an older block's replay, after newer ones were differentiated without.
#[test]
fn a_failure_restores_the_gradients() {
    let setup = setup();
    let (w, calls) = (&setup.model, Cell::new(0));
    let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Last(1)).early_stop(EarlyStop::Off).build();
    let mut h = randn(3, &[5, 4], Kind::Float);
    for _ in 0..2 {
        h = rollout
            .block("step", &[("h", &h)], |_, i| {
                calls.set(calls.get() + 1);
                if is_replaying() {
                    Err("the pump is dry".into())
                } else {
                    Ok::<_, replay_runtime::BoxError>(i[0].matmul(w).tanh())
                }
            })
            .unwrap();
    }
    assert!(rollout.backward(&h.sum(Kind::Float)).is_err());
    assert_eq!(calls.get(), 3);
    assert!(!setup.model.grad().defined());
}

/// Kept graphs die with the loss, or with the rollout, in any order.
#[test]
fn dropped_in_every_order() {
    let setup = setup();
    let w = &setup.model;
    let make = || {
        let rollout = Rollout::builder(&setup.vs).keep_graphs(Keep::Last(3)).build();
        let mut h = randn(3, &[5, 4], Kind::Float);
        for _ in 0..5 {
            h = rollout.block("step", &[("h", &h)], |_, i| i[0].matmul(w).tanh()).unwrap();
        }
        (rollout, h.sum(Kind::Float))
    };
    let (rollout, loss) = make();
    drop(rollout);
    assert!(loss.f_backward().is_err());
    let (rollout, loss) = make();
    std::thread::spawn(move || drop(loss)).join().unwrap();
    drop(rollout);
    let (rollout, loss) = make();
    drop(loss);
    let y = rollout.block("again", &[("x", &randn(1, &[5, 4], Kind::Float))], |_, i| i[0].matmul(w).tanh()).unwrap();
    assert_eq!(rollout.backward(&y.sum(Kind::Float)).unwrap().total.kept, 1);
}
