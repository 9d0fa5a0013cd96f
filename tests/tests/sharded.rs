//! Guarantee *sharded*: each process ends with its pieces of the gradient of all, to the last bit of a serial sum in rank
//! order.

#![expect(clippy::cast_precision_loss, reason = "processes are few")]

use std::collections::BTreeMap;

use replay_runtime::dist::Dist;
use replay_runtime::{Rollout, Sharded, replay_block};
use replay_tests::ranks::{each_rank, mean_in_rank_order, piece};
use replay_tests::{bytes, randn};
use tch::nn::{Module, OptimizerConfig};
use tch::{Device, Kind, Tensor, nn};

const WIDTH: i64 = 5;
const STEPS: usize = 3;
/// Whether blocks end early, and transfers overlap.
const WAYS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

struct Layer {
    linear: nn::Linear,
    scale: Tensor,
}

impl Layer {
    fn new(path: &nn::Path<'_>) -> Self {
        let linear = nn::linear(path / "linear", WIDTH, WIDTH, nn::LinearConfig::default());
        Self { linear, scale: path.var("scale", &[], nn::Init::Const(1.1)) }
    }

    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        self.apply(x)
    }

    #[replay_block(early_stop)]
    fn forward_early(&self, x: &Tensor) -> Tensor {
        self.apply(x)
    }

    fn apply(&self, x: &Tensor) -> Tensor {
        x + self.linear.forward(x).tanh() * &self.scale
    }
}

struct Model {
    vs: nn::VarStore,
    head: nn::Linear,
    layers: Vec<Layer>,
    early_stop: bool,
}

impl Model {
    fn new() -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let head = nn::linear(vs.root() / "head", WIDTH, 2, nn::LinearConfig::default());
        let layers = (0..2).map(|i| Layer::new(&(vs.root() / "layers" / i))).collect();
        Self { vs, head, layers, early_stop: false }
    }

    fn shard<'d>(&self, dist: &'d Dist, overlap: bool) -> Sharded<'d> {
        let units = self.layers.iter().enumerate();
        let builder = Sharded::builder(dist, &self.vs).overlap(overlap);
        units.fold(builder, |all, (i, layer)| all.unit(&format!("layers.{i}"), layer)).build().unwrap()
    }

    fn loss<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Tensor {
        let run = |x: Tensor, layer: &'m Layer| {
            let step = if self.early_stop { Layer::forward_early_replay } else { Layer::forward_replay };
            step(layer, rollout, &x).unwrap()
        };
        let steps = (0..STEPS).flat_map(|_| &self.layers);
        let x = steps.fold(x.shallow_clone(), run);
        self.head.forward(&x).square().mean(Kind::Float)
    }

    fn gradients(&self) -> Vec<(String, Tensor)> {
        let mut all: Vec<_> = self.vs.variables().into_iter().map(|(name, variable)| (name, variable.grad())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}

fn batch(rank: usize) -> Tensor {
    randn(10 + i64::try_from(rank).unwrap(), &[4, WIDTH], Kind::Float)
}

/// What one process would find: the loss, and the gradient of each use of each parameter, the last use first.
fn alone(rank: usize) -> (Tensor, BTreeMap<String, Vec<Tensor>>) {
    let model = Model::new();
    let variables = model.vs.variables();
    let mut uses: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    let mut leaf = |name: String| {
        let leaf = variables[&name].detach().copy().set_requires_grad(true);
        uses.entry(name).or_default().insert(0, leaf.shallow_clone());
        leaf
    };
    let mut x = batch(rank);
    for i in (0..STEPS).flat_map(|_| 0..model.layers.len()) {
        let [w, b, scale] = ["linear.weight", "linear.bias", "scale"].map(|name| leaf(format!("layers.{i}.{name}")));
        x = &x + x.linear(&w, Some(&b)).tanh() * scale;
    }
    let [w, b] = ["weight", "bias"].map(|name| leaf(format!("head.{name}")));
    let loss = x.linear(&w, Some(&b)).square().mean(Kind::Float);
    loss.backward();
    let grads = |uses: Vec<Tensor>| uses.iter().map(Tensor::grad).collect();
    (loss, uses.into_iter().map(|(name, uses)| (name, grads(uses))).collect())
}

/// The gradient of all ranks: each use's mean, summed in rank order, and these added up.
fn together(world: usize) -> BTreeMap<String, Tensor> {
    mean_in_rank_order(world, |rank| alone(rank).1)
}

fn train(dist: &Dist, early_stop: bool, overlap: bool) {
    let (rank, world) = (dist.rank(), dist.world());
    let mut model = Model::new();
    model.early_stop = early_stop;
    let sharded = model.shard(dist, overlap);
    let expected = together(world);
    // The second rollout adds to what the first has left.
    for rollouts in 1..=2 {
        let rollout = Rollout::new(&sharded);
        let loss = model.loss(&rollout, &batch(rank));
        let report = rollout.backward(&loss).unwrap();
        assert_eq!(report.total.stopped, if early_stop { report.total.replays } else { 0 });
        assert_eq!(bytes(&loss), bytes(&alone(rank).0));
        for (name, found) in model.gradients() {
            let expected = if rollouts == 1 { expected[&name].copy() } else { &expected[&name] + &expected[&name] };
            assert_eq!(bytes(&piece(&expected, rank, world)), bytes(&found), "{name} of rank {rank} of {world}");
        }
    }
    sharded.zero_grad();
    assert!(model.gradients().iter().all(|(_, grad)| !grad.defined()));
}

#[test]
fn a_world_of_one_has_the_gradients_of_one_process() {
    let dist = Dist::single();
    for (early_stop, overlap) in WAYS {
        train(&dist, early_stop, overlap);
    }
    dist.shutdown().unwrap();
}

#[test]
fn gradients_are_the_means_in_rank_order() {
    each_rank("gradients_are_the_means_in_rank_order", &[2, 3, 4], |dist| {
        for (early_stop, overlap) in WAYS {
            train(&dist, early_stop, overlap);
        }
        dist.shutdown().unwrap();
    });
}

struct Shift(Tensor);

impl Shift {
    #[replay_block(early_stop)]
    fn forward(&self, x: &Tensor) -> Tensor {
        x + &self.0
    }
}

/// The graph of such a block has saved nothing, so there is no replay; its parameter's gradient is that of the whole still.
#[test]
fn a_block_that_is_not_replayed_has_its_window_too() {
    each_rank("a_block_that_is_not_replayed_has_its_window_too", &[1, 2], |dist| {
        let (rank, world) = (dist.rank(), dist.world());
        let vs = nn::VarStore::new(Device::Cpu);
        let shift = Shift(vs.root().var("shift", &[3], nn::Init::Const(0.5)));
        let sharded = Sharded::builder(&dist, &vs).unit("shift", &shift).build().unwrap();
        let factors = Tensor::from_slice(&[1f32, 2.0, 4.0]);
        let rollout = Rollout::new(&sharded);
        let y = shift.forward_replay(&rollout, &Tensor::zeros([2, 3], (Kind::Float, Device::Cpu))).unwrap();
        let report = rollout.backward(&(y * &factors).sum(Kind::Float)).unwrap();
        assert_eq!((report.total.kept, report.total.replays), (1, 0));
        assert_eq!(bytes(&shift.0.grad()), bytes(&piece(&(factors * 2.0), rank, world)));
        dist.shutdown().unwrap();
    });
}

/// What is on its way for a block that turns out not to be replayed is not what the next rollout computes with.
#[test]
fn parameters_that_were_expected_in_vain_are_forgotten() {
    each_rank("parameters_that_were_expected_in_vain_are_forgotten", &[2], |dist| {
        let model = Model::new();
        let sharded = model.shard(&dist, true);
        let x = batch(dist.rank());
        let rollout = Rollout::new(&sharded);
        let unused = model.layers[0].forward_replay(&rollout, &x).unwrap();
        let y = model.layers[1].forward_replay(&rollout, &x).unwrap();
        let report = rollout.backward(&y.square().mean(Kind::Float)).unwrap();
        assert_eq!(report.total.replays, 1);
        drop(unused);
        tch::no_grad(|| drop(model.layers[0].linear.ws.shallow_clone().fill_(0.0)));
        tch::no_grad(|| drop(model.layers[0].linear.bs.as_ref().unwrap().shallow_clone().fill_(0.0)));
        let rollout = Rollout::new(&sharded);
        let y = model.layers[0].forward_replay(&rollout, &x).unwrap();
        assert_eq!(bytes(&y), bytes(&x));
        drop(rollout);
        dist.shutdown().unwrap();
    });
}

/// Elementwise optimizers do to pieces what they do to the whole.
#[test]
fn training_is_that_of_one_process_with_all_batches() {
    each_rank("training_is_that_of_one_process_with_all_batches", &[1, 2, 3], |dist| {
        let (rank, world) = (dist.rank(), dist.world());
        let model = Model::new();
        let sharded = model.shard(&dist, false);
        let mut optimizer = nn::AdamW::default().build(&model.vs, 1e-2).unwrap();
        let whole = Model::new();
        let mut whole_optimizer = nn::AdamW::default().build(&whole.vs, 1e-2).unwrap();
        for _ in 0..4 {
            let rollout = Rollout::new(&sharded);
            let loss = model.loss(&rollout, &batch(rank));
            rollout.backward(&loss).unwrap();
            let norm = sharded.clip_grad_norm(0.3).unwrap();
            optimizer.step();
            sharded.zero_grad();

            whole_optimizer.zero_grad();
            let mut losses = Vec::new();
            for rank in 0..world {
                let rollout = Rollout::new(&whole.vs);
                losses.push(whole.loss(&rollout, &batch(rank)));
                rollout.backward(&(&losses[rank] / world as f64)).unwrap();
            }
            let gradients = whole.gradients();
            let squares = gradients.iter().map(|(_, grad)| grad.square().sum(Kind::Double).double_value(&[]));
            let whole_norm = squares.sum::<f64>().sqrt();
            whole_optimizer.clip_grad_norm(0.3);
            whole_optimizer.step();
            assert!((norm / whole_norm - 1.0).abs() < 1e-6, "{norm} {whole_norm}");
            let far = (loss - &losses[rank]).abs().double_value(&[]);
            assert!(far < 1e-6, "{far}");
        }
        dist.shutdown().unwrap();
    });
}

/// Between rollouts, and while blocks outside of a unit run, a process holds pieces.
#[test]
fn parameters_are_whole_only_in_their_windows() {
    each_rank("parameters_are_whole_only_in_their_windows", &[1, 2, 3], |dist| {
        for (early_stop, overlap) in WAYS {
            check_windows(&dist, early_stop, overlap);
        }
        dist.shutdown().unwrap();
    });
}

fn check_windows(dist: &Dist, early_stop: bool, overlap: bool) {
    let (rank, world) = (dist.rank(), dist.world());
    let whole: BTreeMap<_, _> = Model::new().vs.variables().into_iter().collect();
    let mut model = Model::new();
    model.early_stop = early_stop;
    let sharded = model.shard(dist, overlap);
    let check = |units: bool, head: bool| {
        for (name, variable) in model.vs.variables() {
            let (expected, is_whole) = (&whole[&name], if name.starts_with("head") { head } else { units });
            let expected = if is_whole { expected.shallow_clone() } else { piece(expected, rank, world) };
            assert_eq!((variable.size(), bytes(&variable)), (expected.size(), bytes(&expected)), "{name}");
        }
    };
    check(false, false);
    let rollout = Rollout::new(&sharded);
    check(false, true);
    let loss = model.loss(&rollout, &batch(rank));
    check(false, true);
    rollout.backward(&loss).unwrap();
    check(false, false);
    drop(Rollout::new(&sharded));
    check(false, false);
    let largest = whole
        .iter()
        .filter(|(name, _)| name.starts_with("layers.0"))
        .map(|(_, whole)| whole.numel() * 4)
        .sum::<usize>();
    let head =
        whole.iter().filter(|(name, _)| name.starts_with("head")).map(|(_, whole)| whole.numel() * 4).sum::<usize>();
    assert_eq!(sharded.memory_report().gathered_peak, (largest + head) as u64);
}
