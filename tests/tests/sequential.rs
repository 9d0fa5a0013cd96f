//! A list of layers in segments: guarantees *values*, *buffers*, *random numbers* and *modes* for any number of
//! segments, layers of each type that tch's users hold, and what is no list to be cut.
//!
//! Each weight is used once inside one segment: plain autograd's bits, but for autocast, where a segment casts for itself
//! and so is compared with blockwise autograd.

use std::cell::Cell;
use std::iter::once;
use std::ops::Range;

use replay_runtime::{AutocastGuard, BlockOptions, BoxError, Pass, ReplayError, Rollout};
use replay_tests::{How, Oracle, Setup, assert_exact, bytes, randn, same_bits};
use tch::nn::{Module, ModuleT};
use tch::{Device, Kind, Tensor, nn};

const LAYERS: usize = 7;

fn linears(path: &nn::Path<'_>) -> Vec<nn::Linear> {
    (0..LAYERS).map(|i| nn::linear(path / i, 6, 6, nn::LinearConfig::default())).collect()
}

fn with_leaf() -> Setup<Vec<nn::Linear>> {
    Setup::new(linears).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

fn loss(y: &Tensor) -> Tensor {
    y.to_kind(Kind::Float).square().sum(Kind::Float)
}

/// Runs the layers as a list of pieces: in the library's segments where it replays.
fn run<'m, L>(
    how: &How<'_, 'm>,
    layers: &'m [L],
    cuts: &[Range<usize>],
    x: &Tensor,
    apply: impl Fn(&'m L, &Tensor) -> Tensor + Copy + 'm,
) -> Tensor {
    if let How::Replay(rollout) = how {
        return rollout.sequential("layers", cuts.len(), layers, x, apply).expect("the segments succeed");
    }
    cuts.iter().fold(x.shallow_clone(), |x, cut| {
        let piece = &layers[cut.clone()];
        how.block("piece", &[("input", &x)], move |i| {
            piece.iter().fold(i[0].shallow_clone(), |x, layer| apply(layer, &x))
        })
    })
}

/// Seven layers in one, two, three and seven pieces.
fn cuts() -> [Vec<Range<usize>>; 4] {
    let singly = (0..LAYERS).map(|i| i..i + 1).collect();
    [once(0..7).collect(), vec![0..3, 3..7], vec![0..2, 2..4, 4..7], singly]
}

#[test]
fn any_number_of_segments_gives_the_same_bits() {
    for cuts in cuts() {
        assert_exact(Oracle::Plain, with_leaf, |how, layers, leaves| {
            loss(&run(how, layers, &cuts, &leaves[0].1, |layer, x| layer.forward(x).tanh()))
        });
    }
}

#[test]
fn segments_draw_what_plain_layers_draw() {
    for cuts in cuts() {
        assert_exact(Oracle::Plain, with_leaf, |how, layers, leaves| {
            tch::manual_seed(11);
            loss(&run(how, layers, &cuts, &leaves[0].1, |layer, x| layer.forward(x).dropout(0.4, true)))
        });
    }
}

#[test]
fn segments_run_in_the_autocast_of_their_forward() {
    for cuts in cuts() {
        assert_exact(Oracle::Blockwise, with_leaf, |how, layers, leaves| {
            let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16);
            loss(&run(how, layers, &cuts, &leaves[0].1, |layer, x| layer.forward(x).tanh()))
        });
    }
}

/// Boxed layers with a `train` flag, of different types, whose statistics move.
#[test]
fn boxed_layers_update_their_statistics_once() {
    fn layers(path: &nn::Path<'_>) -> Vec<Box<dyn ModuleT>> {
        let linear = |i: i64| nn::linear(path / i, 6, 6, nn::LinearConfig::default());
        let norm = |i: i64| nn::batch_norm1d(path / i, 6, nn::BatchNormConfig::default());
        vec![
            Box::new(linear(0)),
            Box::new(norm(1)),
            Box::new(nn::func(Tensor::tanh)),
            Box::new(norm(3)),
            Box::new(linear(4)),
        ]
    }
    let x = randn(2, &[5, 6], Kind::Float);
    let plain = Setup::new(layers);
    loss(&plain.model.iter().fold(x.shallow_clone(), |x, layer| layer.forward_t(&x, true))).backward();
    for segments in 1..=5 {
        let setup = Setup::new(layers);
        let rollout = Rollout::new(&setup.vs);
        let options = BlockOptions::new("layers").buffers(true);
        let y =
            rollout.sequential_with(&options, segments, &setup.model, &x, |layer, x| layer.forward_t(x, true)).unwrap();
        rollout.backward(&loss(&y)).unwrap();
        for (name, expected) in plain.vs.variables() {
            let found = &setup.vs.variables()[&name];
            assert!(same_bits(&expected, found), "{name} in {segments}");
            assert!(
                !expected.requires_grad() || bytes(&expected.grad()) == bytes(&found.grad()),
                "{name} in {segments}"
            );
        }
    }
}

/// Closures as layers, in blocks that the report names after them; the last is a block too.
#[test]
fn the_report_names_the_layers_of_each_segment() {
    let setup = Setup::new(|path| path.var("w", &[], nn::Init::Const(0.5)));
    let runs = Cell::new(0);
    let (w, runs_seen) = (&setup.model, &runs);
    let layers: Vec<_> = (0..3)
        .map(|i| -> Box<dyn Fn(&Tensor) -> Tensor> {
            Box::new(move |x| {
                runs_seen.set(runs_seen.get() + 1);
                (x * w + i64::from(i)).sin()
            })
        })
        .collect();
    let rollout = Rollout::new(&setup.vs);
    let y = rollout.sequential("waves", 2, &layers, &Tensor::from(1f32), |layer, x| layer(x)).unwrap();
    let report = rollout.backward(&y).unwrap();
    let rows: Vec<_> =
        report.blocks.iter().map(|(name, block)| (name.as_str(), block.forwards, block.replays)).collect();
    assert_eq!(rows, [("waves[0..1]", 1, 1), ("waves[1..3]", 1, 1)]);
    assert_eq!(runs.get(), 6);
}

/// The layers in three segments, of which the fourth layer fails while `broken`.
fn leaking<'m>(
    rollout: &Rollout<'m>,
    layers: &'m [nn::Linear],
    broken: &'m Cell<bool>,
    x: &Tensor,
) -> Result<Tensor, ReplayError> {
    rollout.sequential("layers", 3, layers, x, |layer, x| -> Result<_, BoxError> {
        if broken.get() && std::ptr::eq(layer, &raw const layers[3]) {
            return Err("it leaks".into());
        }
        Ok(layer.forward(x).tanh())
    })
}

#[test]
fn the_error_of_a_layer_names_its_segment() {
    fn check(error: &ReplayError, expected: Pass) {
        let ReplayError::Block { block, pass, .. } = error else { panic!("{error}") };
        assert_eq!((block.as_str(), *pass), ("layers[2..4]", expected));
    }
    let (setup, broken) = (with_leaf(), Cell::new(true));
    let x = &setup.leaves[0].1;
    let rollout = Rollout::new(&setup.vs);
    check(&leaking(&rollout, &setup.model, &broken, x).unwrap_err(), Pass::Forward);
    broken.set(false);
    let y = leaking(&rollout, &setup.model, &broken, x).unwrap();
    broken.set(true);
    check(&rollout.backward(&loss(&y)).unwrap_err(), Pass::Replay);
    assert!(setup.grads().values().all(Option::is_none));
}

#[test]
fn a_list_that_cannot_be_cut_is_an_error() {
    let setup = with_leaf();
    let rollout = Rollout::new(&setup.vs);
    for (layers, segments) in [(&setup.model[..], 0), (&setup.model[..], LAYERS + 1), (&[], 1), (&[], 0)] {
        let error = rollout.sequential("layers", segments, layers, &setup.leaves[0].1, Module::forward);
        let error = error.unwrap_err();
        assert!(
            matches!(&error, ReplayError::Segments { block, segments: asked, layers: given }
                if block == "layers" && *asked == segments && *given == layers.len()),
            "{error}"
        );
    }
}

/// Without gradients the layers are plain calls.
#[test]
fn in_inference_the_layers_just_run() {
    let setup = with_leaf();
    let x = &setup.leaves[0].1;
    let rollout = Rollout::inference();
    let y = rollout.sequential("layers", 3, &setup.model, x, Module::forward).unwrap();
    assert!(!y.requires_grad());
    assert!(same_bits(&y, &setup.model.iter().fold(x.shallow_clone(), |x, layer| layer.forward(&x))));
}
