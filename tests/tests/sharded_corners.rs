//! Guarantee *sharded*, in corners: what somebody holds, gradients that are sparse, what ranks expect differently, and refusals that
//! all ranks must hear of.

use replay_runtime::dist::Dist;
use replay_runtime::{CheckpointError, Optimizer, ReplayError, Rollout, ShardError, Sharded, replay_block};
use replay_tests::ranks::{each_rank, piece};
use replay_tests::{bytes, randn};
use std::cell::RefCell;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

struct Layer {
    linear: nn::Linear,
    seen: RefCell<Vec<Tensor>>,
}

impl Layer {
    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        self.seen.borrow_mut().push(self.linear.ws.detach());
        x + self.linear.forward(x).tanh()
    }
}

struct Model {
    vs: nn::VarStore,
    layers: Vec<Layer>,
}

impl Model {
    fn new() -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let layer = |i: usize| Layer {
            linear: nn::linear(vs.root() / "layers" / i, 5, 5, nn::LinearConfig::default()),
            seen: RefCell::default(),
        };
        let layers = (0..3).map(layer).collect();
        Self { vs, layers }
    }

    fn shard<'d>(&self, dist: &'d Dist, overlap: bool) -> Sharded<'d> {
        let builder = Sharded::builder(dist, &self.vs).overlap(overlap);
        let units = self.layers.iter().enumerate();
        units.fold(builder, |all, (i, layer)| all.unit(&format!("layers.{i}"), layer)).build().unwrap()
    }

    fn train(&self, sharded: &Sharded<'_>, seed: i64) {
        let rollout = Rollout::new(sharded);
        let mut x = randn(seed, &[4, 5], Kind::Float);
        for layer in &self.layers {
            x = layer.forward_replay(&rollout, &x).unwrap();
        }
        rollout.backward(&x.square().mean(Kind::Float)).unwrap();
    }
}

/// The mean of the ranks' gradients is the gradient of one batch of all of theirs, as plain autograd finds it.
#[test]
fn gradients_are_those_of_one_large_batch() {
    each_rank("gradients_are_those_of_one_large_batch", &[1, 2, 3, 4], |dist| {
        let (rank, world) = (dist.rank(), dist.world());
        let batch = |rank: usize| randn(i64::try_from(rank).unwrap(), &[4, 5], Kind::Double);
        let double = || {
            let mut model = Model::new();
            model.vs.double();
            model
        };
        let (model, whole) = (double(), double());
        let sharded = model.shard(&dist, false);
        let rollout = Rollout::new(&sharded);
        let mut x = batch(rank);
        for layer in &model.layers {
            x = layer.forward_replay(&rollout, &x).unwrap();
        }
        rollout.backward(&x.square().mean(Kind::Double)).unwrap();

        let batches: Vec<_> = (0..world).map(batch).collect();
        let x = whole.layers.iter().fold(Tensor::cat(&batches, 0), |x, layer| layer.forward(&x));
        x.square().mean(Kind::Double).backward();
        let all = whole.vs.variables();
        for (name, found) in model.vs.variables() {
            let expected = piece(&all[&name].grad(), rank, world);
            assert!(found.grad().allclose(&expected, 1e-12, 1e-15, false), "{name} of rank {rank} of {world}");
        }
        dist.shutdown().unwrap();
    });
}

/// Memory is used again only where nobody sees it.
#[test]
fn what_somebody_holds_keeps_its_values() {
    each_rank("what_somebody_holds_keeps_its_values", &[1, 2], |dist| {
        let whole = Model::new();
        for overlap in [false, true] {
            let model = Model::new();
            let sharded = model.shard(&dist, overlap);
            model.train(&sharded, 1);
            // By the very tensor, and by a view.
            let held = [model.layers[0].linear.ws.grad(), model.layers[1].linear.ws.grad().detach()];
            let before = held.each_ref().map(bytes);
            sharded.zero_grad();
            for seed in 2..4 {
                model.train(&sharded, seed);
                sharded.zero_grad();
            }
            assert_eq!(held.each_ref().map(bytes), before);
            for (layer, whole) in model.layers.iter().zip(&whole.layers) {
                let seen = layer.seen.borrow();
                assert!(seen.len() == 6 && seen.iter().all(|seen| bytes(seen) == bytes(&whole.linear.ws)));
            }
        }
        dist.shutdown().unwrap();
    });
}

/// A rank that keeps an output alive expects its block to be replayed; the others do not, and nothing goes wrong.
#[test]
fn ranks_may_expect_different_blocks() {
    each_rank("ranks_may_expect_different_blocks", &[2, 3], |dist| {
        let gradients = |overlap: bool| {
            let model = Model::new();
            let sharded = model.shard(&dist, overlap);
            let rollout = Rollout::new(&sharded);
            let x = randn(i64::try_from(dist.rank()).unwrap(), &[4, 5], Kind::Float);
            let aside = model.layers[2].forward_replay(&rollout, &x).unwrap();
            let aside = (dist.rank() == 0).then_some(aside);
            let y = model.layers[0].forward_replay(&rollout, &x).unwrap();
            let y = model.layers[1].forward_replay(&rollout, &y).unwrap();
            rollout.backward(&y.square().mean(Kind::Float)).unwrap();
            drop(aside);
            [0, 1].map(|i| bytes(&model.layers[i].linear.ws.grad()))
        };
        assert_eq!(gradients(true), gradients(false));
        dist.shutdown().unwrap();
    });
}

#[test]
fn sparse_gradients_become_dense() {
    each_rank("sparse_gradients_become_dense", &[1, 2], |dist| {
        tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let config = nn::EmbeddingConfig { sparse: true, ..nn::EmbeddingConfig::default() };
        let table = nn::embedding(vs.root(), 6, 2, config);
        let sharded = Sharded::builder(&dist, &vs).build().unwrap();
        let rollout = Rollout::new(&sharded);
        let rank = i64::try_from(dist.rank()).unwrap();
        let loss = table.forward(&Tensor::from_slice(&[rank, rank + 1, rank])).sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        let expected = if dist.world() == 1 { [2f32, 1.0, 0.0] } else { [1f32, 1.5, 0.5] };
        let expected = Tensor::from_slice(&[&expected[..], &[0.0; 3]].concat()).unsqueeze(1).expand([6, 2], false);
        assert_eq!(bytes(&table.ws.grad()), bytes(&piece(&expected, dist.rank(), dist.world())));
        dist.shutdown().unwrap();
    });
}

#[test]
fn accumulate_in_is_refused() {
    let (dist, model) = (Dist::single(), Model::new());
    let sharded = model.shard(&dist, false);
    let rollout = Rollout::builder(&sharded).accumulate_in(Kind::Double).build();
    let error = model.layers[0].forward_replay(&rollout, &randn(1, &[4, 5], Kind::Float)).unwrap_err();
    assert!(matches!(error, ReplayError::Dist { .. }), "{error}");
    assert!(error.to_string().contains("`accumulate_in` is for stores that are not sharded"), "{error}");
}

/// Also before the first block: what is written to a parameter that is whole for now would be lost.
#[test]
fn a_write_to_a_whole_parameter_is_an_error() {
    let dist = Dist::single();
    let vs = nn::VarStore::new(Device::Cpu);
    let head = vs.root().var("head", &[3], nn::Init::Const(1.0));
    let sharded = Sharded::builder(&dist, &vs).build().unwrap();
    let rollout = Rollout::new(&sharded);
    tch::no_grad(|| drop(head.shallow_clone().fill_(2.0)));
    let x = randn(1, &[3], Kind::Float);
    let error = rollout.block("scale", &[("x", &x)], |_, inputs| &inputs[0] * &head).unwrap_err();
    assert!(error.to_string().contains("variable `head`"), "{error}");
}

/// What is written to a copy of the whole would be gone with it.
#[test]
fn a_step_while_a_rollout_lives_is_an_error() {
    each_rank("a_step_while_a_rollout_lives_is_an_error", &[2], |dist| {
        let vs = nn::VarStore::new(Device::Cpu);
        let head = vs.root().var("head", &[1, 2], nn::Init::Const(1.0));
        let sharded = Sharded::builder(&dist, &vs).build().unwrap();
        let rollout = Rollout::new(&sharded);
        let loss = (&head + 1.0).sum(Kind::Float);
        tch::no_grad(|| drop(head.shallow_clone().fill_(9.0)));
        if dist.rank() == 0 {
            let error = rollout.backward(&loss).unwrap_err();
            assert!(error.to_string().contains("parameter `head` was written to while a rollout lived"), "{error}");
        } else {
            drop(rollout);
            let error = Rollout::new(&sharded).backward(&loss).unwrap_err();
            // Its own finding, not what the other rank says.
            assert!(error.to_string().starts_with("parameter `head` was written to while a rollout lived"), "{error}");
        }
    });
}

#[test]
fn a_pass_inside_a_pass_is_an_error_of_the_inner_one() {
    each_rank("a_pass_inside_a_pass_is_an_error_of_the_inner_one", &[1, 2], |dist| {
        let model = Model::new();
        let sharded = model.shard(&dist, false);
        let (x, inner) = (randn(1, &[4, 5], Kind::Float).set_requires_grad(true), RefCell::new(Vec::new()));
        let rollout = Rollout::new(&sharded);
        let y = model.layers[1].forward_replay(&rollout, &x).unwrap();
        let y = rollout
            .block("outer", &[("y", &y)], |_, inputs| {
                let other = Rollout::new(&sharded);
                let z = model.layers[2].forward_replay(&other, &inputs[0].detach()).unwrap();
                inner
                    .borrow_mut()
                    .push(other.backward(&z.square().mean(Kind::Float)).map_err(|error| error.to_string()));
                &inputs[0] * 2.0
            })
            .unwrap();
        let y = model.layers[0].forward_replay(&rollout, &y).unwrap();
        rollout.backward(&y.square().mean(Kind::Float)).unwrap();
        let inner = inner.into_inner();
        assert!(inner.len() == 2 && inner[0].is_ok(), "{inner:?}");
        assert!(inner[1].as_ref().unwrap_err().contains("in which another one was begun"), "{inner:?}");
        assert!([0, 1].iter().all(|&i| model.layers[i].linear.ws.grad().defined()));
        dist.shutdown().unwrap();
    });
}

#[test]
fn a_rollout_has_one_sharded_store() {
    let (dist, [one, two]) = (Dist::single(), [Model::new(), Model::new()]);
    let [first, second] = [one.shard(&dist, false), two.shard(&dist, false)];
    let rollout = Rollout::builder(&first).store(&second).build();
    let error = one.layers[0].forward_replay(&rollout, &randn(1, &[4, 5], Kind::Float)).unwrap_err();
    assert!(error.to_string().contains("a rollout can have one sharded store"), "{error}");
}

#[test]
fn memory_that_somebody_holds_is_not_cut() {
    let (dist, model) = (Dist::single(), Model::new());
    let view = model.layers[1].linear.ws.detach();
    let error = Sharded::builder(&dist, &model.vs).build().unwrap_err();
    assert!(matches!(&error, ShardError::Held { parameter } if parameter == "layers.1.weight"), "{error}");
    drop(view);
    let dist = Dist::single();
    let first = model.shard(&dist, false);
    let error = Sharded::builder(&dist, &model.vs).build().unwrap_err();
    assert!(matches!(error, ShardError::Held { .. }), "{error}");
    drop(first);
}

#[test]
fn an_optimizer_of_another_store_is_not_saved() {
    let (dist, [one, two]) = (Dist::single(), [Model::new(), Model::new()]);
    let mut sharded = one.shard(&dist, false);
    let mut optimizer = Optimizer::new(&two.vs, nn::AdamW::default(), 1e-2).unwrap();
    let path = std::env::temp_dir().join(format!("replay-other-{}", std::process::id()));
    let error = sharded.save_sharded(&path, Some(&optimizer), 0).unwrap_err();
    assert!(matches!(&error, CheckpointError::Optimizer { parameter } if parameter == "layers.0.bias"), "{error}");
    sharded.save_sharded(&path, None, 0).unwrap();
    let error = sharded.load_sharded(&path, Some(&mut optimizer)).unwrap_err();
    std::fs::remove_dir_all(&path).unwrap();
    assert!(matches!(error, CheckpointError::Optimizer { .. }), "{error}");
}

/// Different checkpoint calls on different ranks are told apart before anything is sent.
#[test]
fn ranks_must_save_and_load_alike() {
    each_rank("ranks_must_save_and_load_alike", &[2], |dist| {
        let model = Model::new();
        let mut sharded = model.shard(&dist, false);
        let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
        // A folder that both know, and that this run alone has.
        let folder = dist.all_gather(f64::from(std::process::id())).unwrap()[0];
        let folder = std::env::temp_dir().join(format!("replay-alike-{folder}"));
        sharded.save_sharded(&folder, Some(&optimizer), 0).unwrap();
        let optimizer = (dist.rank() == 0).then_some(&mut optimizer);
        let error = sharded.load_sharded(&folder, optimizer).unwrap_err();
        assert!(matches!(error, CheckpointError::Ranks { rank: 1, what: "optimizer to load" }), "{error}");
        sharded.load_sharded(&folder, None).unwrap();
        if dist.rank() == 0 {
            std::fs::remove_dir_all(&folder).unwrap();
        }
        let error = if dist.rank() == 0 {
            sharded.save_full(folder.with_extension("full")).unwrap_err()
        } else {
            sharded.save_sharded(folder.with_extension("pieces"), None, 0).unwrap_err()
        };
        let text = error.to_string();
        assert!(text.contains("rank 0: save_full") && text.contains("rank 1: save_sharded"), "{text}");
    });
}

#[test]
fn a_store_that_one_rank_cannot_cut_is_an_error_on_all() {
    each_rank("a_store_that_one_rank_cannot_cut_is_an_error_on_all", &[2, 3], |dist| {
        let model = Model::new();
        let prefix = if dist.rank() == 1 { "layer.0" } else { "layers.0" };
        let error = Sharded::builder(&dist, &model.vs).unit(prefix, &model.layers[0]).build().unwrap_err();
        let text = error.to_string();
        if dist.rank() == 1 {
            assert!(matches!(error, ShardError::NoVariable { .. }), "{text}");
        } else {
            assert!(text.contains("rank 1 has failed: no variable's name is `layer.0`"), "{text}");
        }
    });
}
