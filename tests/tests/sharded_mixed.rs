//! Guarantee *sharded*, in mixed precision: blocks compute in one kind, gradients are sent in another, sums and pieces keep their own;
//! to the last bit of one process that does the same.

use std::collections::BTreeMap;

use replay_runtime::dist::Dist;
use replay_runtime::{Optimizer, Rollout, ShardError, Sharded, replay_block};
use replay_tests::ranks::{each_rank, mean_in_rank_order, piece};
use replay_tests::{bytes, randn};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const STEPS: usize = 2;

struct Layer {
    linear: nn::Linear,
    early_stop: bool,
}

impl Layer {
    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        x + self.linear.forward(x).tanh()
    }

    #[replay_block(early_stop)]
    fn forward_early(&self, x: &Tensor) -> Tensor {
        x + self.linear.forward(x).tanh()
    }
}

struct Model {
    vs: nn::VarStore,
    layers: Vec<Layer>,
    scale: Tensor,
}

impl Model {
    fn new(early_stop: bool) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = |i: usize| nn::linear(vs.root() / "layers" / i, 5, 5, nn::LinearConfig::default());
        let layers = (0..2).map(|i| Layer { linear: linear(i), early_stop }).collect();
        let scale = vs.root().var("scale", &[5], nn::Init::Const(0.7));
        Self { vs, layers, scale }
    }

    fn loss<'m>(&'m self, rollout: &Rollout<'m>, x: Tensor) -> Tensor {
        let mut x = x;
        for layer in (0..STEPS).flat_map(|_| &self.layers) {
            let run = if layer.early_stop { Layer::forward_early_replay } else { Layer::forward_replay };
            x = run(layer, rollout, &x).unwrap();
        }
        (x * &self.scale).square().mean(Kind::Double)
    }
}

fn batch(rank: usize, kind: Kind) -> Tensor {
    randn(10 + i64::try_from(rank).unwrap(), &[4, 5], Kind::Float).to_kind(kind)
}

/// The gradient of each use of each parameter, the last one first.
fn alone(rank: usize, kind: Kind) -> BTreeMap<String, Vec<Tensor>> {
    let variables = Model::new(false).vs.variables();
    let mut uses: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    let mut leaf = |name: String| {
        let leaf = variables[&name].detach().to_kind(kind).copy().set_requires_grad(true);
        uses.entry(name).or_default().insert(0, leaf.shallow_clone());
        leaf
    };
    let mut x = batch(rank, kind);
    for i in (0..STEPS).flat_map(|_| 0..2) {
        let [w, b] = ["weight", "bias"].map(|name| leaf(format!("layers.{i}.{name}")));
        x = &x + x.linear(&w, Some(&b)).tanh();
    }
    (x * leaf("scale".to_owned())).square().mean(Kind::Double).backward();
    uses.into_iter().map(|(name, uses)| (name, uses.iter().map(Tensor::grad).collect())).collect()
}

/// Sent in `reduce`, added up in f32.
fn together(world: usize, param: Kind, reduce: Kind) -> BTreeMap<String, Tensor> {
    let sent = |use_: &Tensor| use_.to_kind(reduce).to_kind(Kind::Float);
    let sent = |(name, uses): (String, Vec<Tensor>)| (name, uses.iter().map(sent).collect());
    mean_in_rank_order(world, |rank| alone(rank, param).into_iter().map(sent).collect())
}

fn check(dist: &Dist, param: Kind, reduce: Kind, early_stop: bool) {
    let (rank, world) = (dist.rank(), dist.world());
    let model = Model::new(early_stop);
    let mut builder = Sharded::builder(dist, &model.vs).mixed(param, reduce).overlap(early_stop);
    for (i, layer) in model.layers.iter().enumerate() {
        builder = builder.unit(&format!("layers.{i}"), layer);
    }
    let sharded = builder.build().unwrap();
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    let before = model.vs.variables();
    let expected = together(world, param, reduce);
    for rollouts in 1..=2 {
        let rollout = Rollout::new(&sharded);
        let loss = model.loss(&rollout, batch(rank, param));
        let report = rollout.backward(&loss).unwrap();
        assert_eq!(report.total.stopped > 0, early_stop);
        for (name, variable) in model.vs.variables() {
            let expected = piece(&expected[&name], rank, world);
            let expected = if rollouts == 1 { expected } else { &expected + &expected };
            assert_eq!(variable.grad().kind(), Kind::Float, "{name}");
            assert_eq!(
                bytes(&variable.grad()),
                bytes(&expected),
                "{name} of rank {rank} of {world}, {param:?} {reduce:?}"
            );
            assert_eq!((variable.kind(), variable.size()), (Kind::Float, before[&name].size()), "{name}");
        }
    }
    let bytes_whole = sharded.memory_report().largest_unit;
    assert_eq!(bytes_whole, 30 * param.elt_size_in_bytes() as u64);
    optimizer.step().unwrap();
    sharded.zero_grad();
}

#[test]
fn sums_are_those_of_one_process() {
    each_rank("sums_are_those_of_one_process", &[1, 2, 3], |dist| {
        for (param, reduce) in [
            (Kind::BFloat16, Kind::Float),
            (Kind::BFloat16, Kind::BFloat16),
            (Kind::Float, Kind::BFloat16),
            (Kind::Double, Kind::Float),
        ] {
            for early_stop in [false, true] {
                check(&dist, param, reduce, early_stop);
            }
        }
        dist.shutdown().unwrap();
    });
}

#[test]
fn half_is_refused() {
    let (dist, model) = (Dist::single(), Model::new(false));
    let error = Sharded::builder(&dist, &model.vs).mixed(Kind::Half, Kind::Float).build().unwrap_err();
    assert!(matches!(error, ShardError::Mixed { kind: Kind::Half }), "{error}");
    assert!(error.to_string().contains("cannot be sent as Half"), "{error}");
}
