//! Guarantee *sharded*, for every kind of parameter: frozen, ignored, unused here or everywhere, shared, without elements, of fewer
//! elements than there are ranks, in other kinds; and buffers.

#![expect(clippy::cast_precision_loss, reason = "processes are few")]

use std::collections::BTreeMap;

use replay_runtime::dist::Dist;
use replay_runtime::{BlockOptions, ReplayError, Rollout, Sharded};
use replay_tests::ranks::{each_rank, piece};
use replay_tests::{bytes, randn};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

const WORLDS: [usize; 4] = [1, 2, 3, 4];

/// One block of everything, as an object that a unit can be of.
struct Layer {
    matrix: Tensor,
    row: Tensor,
    scalar: Tensor,
    one: Tensor,
    empty: Tensor,
    frozen: Tensor,
    sometimes: Tensor,
    mean: Tensor,
}

struct Model {
    vs: nn::VarStore,
    layer: Layer,
    /// Of no unit, and used around the block too.
    shared: Tensor,
    ignored: Tensor,
}

impl Model {
    fn new(kind: Kind) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let (root, path) = (vs.root(), vs.root() / "layer");
        let random = nn::Init::Randn { mean: 0.0, stdev: 0.5 };
        let _unused = path.var("unused", &[4], random);
        let layer = Layer {
            matrix: path.var("matrix", &[3, 3], random),
            row: path.var("row", &[1, 3], random),
            scalar: path.var("scalar", &[], nn::Init::Const(1.2)),
            one: path.var("one", &[1], nn::Init::Const(0.8)),
            empty: path.var("empty", &[0, 3], random),
            frozen: path.var("frozen", &[3, 3], random),
            sometimes: path.var("sometimes", &[3], random),
            mean: path.zeros_no_train("mean", &[3]),
        };
        let shared = root.var("shared", &[3], random);
        let ignored = root.var("ignored", &[3], random);
        match kind {
            Kind::Double => vs.double(),
            Kind::BFloat16 => vs.bfloat16(),
            _ => {}
        }
        let _ = layer.frozen.shallow_clone().set_requires_grad(false);
        Self { vs, layer, shared, ignored }
    }

    fn shard<'d>(&self, dist: &'d Dist) -> Sharded<'d> {
        Sharded::builder(dist, &self.vs).unit("layer", &self.layer).ignore("ignored").build().unwrap()
    }
}

impl Layer {
    fn forward(&self, x: &Tensor, shared: &Tensor, ignored: &Tensor, odd: bool) -> Tensor {
        let h = (x.matmul(&self.matrix) * &self.scalar + &self.row).tanh();
        let h = h.matmul(&self.frozen) * &self.one + shared + ignored;
        let h = &h + self.empty.sum(h.kind());
        let h = if odd { h * &self.sometimes } else { h };
        let mean = h.detach().mean_dim(0, false, h.kind());
        tch::no_grad(|| self.mean.shallow_clone().copy_(&(&self.mean * 0.5 + mean)));
        h
    }
}

fn run<'m>(model: &'m Model, rollout: &Rollout<'m>, rank: usize, kind: Kind) -> Tensor {
    let mut x = randn(i64::try_from(rank).unwrap(), &[4, 3], kind);
    for _ in 0..2 {
        let options = BlockOptions::new("layer").unit(&model.layer).buffers(true);
        let body = move |_: &Rollout<'_>, inputs: &[Tensor]| {
            model.layer.forward(&inputs[0], &model.shared, &model.ignored, rank % 2 == 1)
        };
        x = rollout.block_with(options, &[("x", &x)], body).unwrap();
    }
    (x * &model.shared).square().mean(kind)
}

fn gradients(model: &Model) -> BTreeMap<String, Tensor> {
    model.vs.variables().into_iter().map(|(name, variable)| (name, variable.grad())).collect()
}

fn close(a: &Tensor, b: &Tensor, kind: Kind) -> bool {
    let tolerance = match kind {
        Kind::Double => 1e-14,
        Kind::Float => 1e-5,
        _ => 3e-2,
    };
    a.size() == b.size() && a.to_kind(Kind::Double).allclose(&b.to_kind(Kind::Double), tolerance, tolerance, false)
}

fn check(kind: Kind, dist: &Dist) {
    let (rank, world) = (dist.rank(), dist.world());
    let model = Model::new(kind);
    let sharded = model.shard(dist);
    let rollout = Rollout::new(&sharded);
    let loss = run(&model, &rollout, rank, kind);
    rollout.backward(&loss).unwrap();

    let part = 1.0 / world as f64;
    let mut expected: BTreeMap<String, Option<Tensor>> = BTreeMap::new();
    let mut own = None;
    for other in 0..world {
        let whole = Model::new(kind);
        let rollout = Rollout::new(&whole.vs);
        let loss = run(&whole, &rollout, other, kind);
        rollout.backward(&loss).unwrap();
        for (name, grad) in gradients(&whole) {
            let grad = grad.defined().then(|| grad * part);
            let sum = expected.remove(&name).flatten();
            let sum = match (sum, grad) {
                (Some(sum), Some(grad)) => Some(sum + grad),
                (sum, grad) => sum.or(grad),
            };
            expected.insert(name, sum);
        }
        if other == rank {
            own = Some((loss, whole));
        }
    }
    let (own_loss, whole) = own.unwrap();
    assert_eq!(bytes(&loss), bytes(&own_loss));
    // Buffers, and what is ignored, are each rank's own.
    assert_eq!(bytes(&model.layer.mean), bytes(&whole.layer.mean));
    assert_eq!(bytes(&model.ignored.grad()), bytes(&whole.ignored.grad()));
    for (name, found) in gradients(&model).into_iter().filter(|(name, _)| name != "ignored") {
        match &expected[&name] {
            None => assert!(!found.defined(), "{name} has a gradient"),
            Some(expected) => {
                let expected = piece(expected, rank, world);
                assert!(close(&found, &expected, kind), "{name} of rank {rank} of {world}: {found} {expected}");
                assert_eq!(found.kind(), kind, "{name}");
            }
        }
    }
    assert_eq!(gradients(&model)["layer.sometimes"].defined(), world > 1);
}

#[test]
fn all_kinds_of_parameters() {
    each_rank("all_kinds_of_parameters", &WORLDS, |dist| {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            check(kind, &dist);
        }
        dist.shutdown().unwrap();
    });
}

/// Optimizers step over pieces without elements, and over parameters without a gradient.
#[test]
fn optimizers_step_on_all_of_them() {
    each_rank("optimizers_step_on_all_of_them", &[1, 4], |dist| {
        for which in 0..3 {
            let model = Model::new(Kind::Float);
            let sharded = model.shard(&dist);
            let mut optimizer = match which {
                0 => nn::Sgd { momentum: 0.9, ..nn::Sgd::default() }.build(&model.vs, 1e-2),
                1 => nn::AdamW::default().build(&model.vs, 1e-2),
                _ => nn::RmsProp::default().build(&model.vs, 1e-2),
            }
            .unwrap();
            for _ in 0..3 {
                let rollout = Rollout::new(&sharded);
                let loss = run(&model, &rollout, dist.rank(), Kind::Float);
                rollout.backward(&loss).unwrap();
                sharded.clip_grad_norm(1.0).unwrap();
                optimizer.step();
                sharded.zero_grad();
                assert!(f64::try_from(loss).unwrap().is_finite());
            }
        }
        dist.shutdown().unwrap();
    });
}

/// A parameter of a unit is a piece elsewhere: what is computed from it there is an error, not a wrong value.
#[test]
fn a_piece_is_not_taken_for_the_whole() {
    let dist = Dist::single();
    let model = Model::new(Kind::Float);
    let sharded = model.shard(&dist);
    let x = randn(3, &[4, 3], Kind::Float);
    let away = |error: &ReplayError| {
        let text = error.to_string();
        assert!(text.contains("`layer.one`") && text.contains("unit `layer`"), "{text}");
    };

    let rollout = Rollout::new(&sharded);
    let block = rollout.block("other", &[("x", &x)], |_, inputs| &inputs[0] * &model.layer.one);
    away(&block.unwrap_err());
    drop(rollout);

    let dist = Dist::single();
    let model = Model::new(Kind::Float);
    let sharded = model.shard(&dist);
    let rollout = Rollout::new(&sharded);
    let loss = run(&model, &rollout, 0, Kind::Float) + model.layer.one.square().sum(Kind::Float);
    away(&rollout.backward(&loss).unwrap_err());
    assert!(gradients(&model).values().all(|grad| !grad.defined()));
}
