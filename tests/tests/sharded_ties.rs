//! Guarantee *sharded*, where a tensor has several names: in one unit, or in none, it is one parameter, and a checkpoint has all
//! its names; what could not be whole for one of its names is an error that names both, and nothing is cut then.

#![expect(clippy::cast_precision_loss, reason = "processes are few")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use replay_runtime::dist::Dist;
use replay_runtime::{Optimizer, Rollout, ShardError, Sharded, replay_block};
use replay_tests::ranks::{case, each_rank, own_builder, piece, run, texts};
use replay_tests::{bytes, randn};
use tch::nn::{self, Init};
use tch::{Device, Kind, Tensor};

const RANDOM: Init = Init::Randn { mean: 0.0, stdev: 0.4 };

/// A second name for a tensor of the store, as somebody gives it who wants the names of another library's file.
fn name(vs: &nn::VarStore, name: &str, tensor: &Tensor) {
    vs.variables_.lock().unwrap().named_variables.insert(name.to_owned(), tensor.shallow_clone());
}

/// Of one matrix, there and back.
struct Layer {
    down: Tensor,
    up: Tensor,
    ignored: [Tensor; 2],
}

impl Layer {
    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        x + x.matmul(&self.down).tanh().matmul(&self.up.tr()) + &self.ignored[0] * &self.ignored[1]
    }
}

struct Model {
    vs: nn::VarStore,
    layer: Layer,
    embedding: Tensor,
    head: Tensor,
}

impl Model {
    fn new(seed: i64) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let (root, path) = (vs.root(), vs.root() / "layer");
        let down = path.var("down", &[5, 3], RANDOM);
        // Trainable twice.
        let up = path.add("up", down.shallow_clone(), true);
        let ignored = path.var("ignored_a", &[5], RANDOM);
        let ignored = [ignored.shallow_clone(), path.add("ignored_b", ignored, true)];
        let embedding = root.var("embedding", &[7, 5], RANDOM);
        name(&vs, "head.weight", &embedding);
        let head = vs.variables().remove("head.weight").unwrap();
        let mean = root.zeros_no_train("mean", &[2]);
        name(&vs, "layer.mean", &mean);
        Self { vs, layer: Layer { down, up, ignored }, embedding, head }
    }

    fn shard<'d>(&self, dist: &'d Dist) -> Sharded<'d> {
        Sharded::builder(dist, &self.vs)
            .unit("layer", &self.layer)
            .ignore("layer.ignored_a")
            .ignore("layer.ignored_b")
            .build()
            .unwrap()
    }

    fn variables(&self) -> BTreeMap<String, Tensor> {
        self.vs.variables().into_iter().collect()
    }

    fn bits(&self) -> BTreeMap<String, Vec<u8>> {
        self.variables().into_iter().map(|(name, variable)| (name, bytes(&variable))).collect()
    }

    /// The gradients of one rank's batch.
    fn differentiate<'m>(&'m self, rollout: Rollout<'m>, rank: usize) {
        let seed = i64::try_from(rank).unwrap();
        let tokens = Tensor::from_slice(&[seed % 7, 3, 3, 6]);
        let x = Tensor::embedding(&self.embedding, &tokens, -1, false, false);
        let x = self.layer.forward_replay(&rollout, &x).unwrap();
        let loss = (x.matmul(&self.head.tr()) * randn(seed, &[4, 7], Kind::Float)).tanh().mean(Kind::Float);
        rollout.backward(&loss).unwrap();
    }

    /// Whether each name is one of those that are pieces.
    fn is_cut(name: &str) -> bool {
        !name.contains("ignored") && !name.contains("mean")
    }
}

/// In a process that was started as a rank: with a folder of its test.
fn task() -> Option<(Dist, PathBuf)> {
    Some((own_builder()?.connect().unwrap(), PathBuf::from(case())))
}

/// Runs the test as so many ranks, with a folder that is gone when they have ended.
fn start(test: &str, worlds: &[usize]) {
    for &world in worlds {
        let folder = std::env::temp_dir().join(format!("replay-ties-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let ended = run(test, folder.to_str().unwrap(), world, |_, _| ());
        let _ = std::fs::remove_dir_all(&folder);
        assert!(ended.iter().all(|rank| rank.status.success()), "{test}, {world} ranks:\n{}", texts(&ended));
    }
}

/// The mean over all ranks, in rank order, as one process finds it that has the whole model.
fn means(world: usize) -> BTreeMap<String, Tensor> {
    let mut sums = BTreeMap::<String, Tensor>::new();
    for rank in 0..world {
        let whole = Model::new(3);
        whole.differentiate(Rollout::new(&whole.vs), rank);
        for (name, variable) in whole.variables().into_iter().filter(|(name, _)| Model::is_cut(name)) {
            let grad = variable.grad();
            let sum = sums.remove(&name).map_or_else(|| grad.copy(), |sum| sum + &grad);
            sums.insert(name, sum);
        }
    }
    sums.into_iter().map(|(name, sum)| (name, sum * (1.0 / world as f64))).collect()
}

#[test]
fn a_tensor_of_two_names_is_one_parameter() {
    const NAME: &str = "a_tensor_of_two_names_is_one_parameter";
    let Some((dist, folder)) = task() else { return start(NAME, &[1, 2, 3]) };
    let (rank, world) = (dist.rank(), dist.world());
    let model = Model::new(3);
    let sharded = model.shard(&dist);
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    model.differentiate(Rollout::new(&sharded), rank);
    let (means, found) = (means(world), model.variables());
    for (name, mean) in &means {
        assert_eq!(bytes(&found[name].grad()), bytes(&piece(mean, rank, world)), "{name} of rank {rank} of {world}");
    }

    // One process takes the same step with the same gradient.
    let whole = Model::new(3);
    let mut of_whole = Optimizer::new(&whole.vs, nn::AdamW::default(), 1e-2).unwrap();
    for name in ["layer.down", "embedding"] {
        (&whole.variables()[name] * &means[name]).sum(Kind::Float).backward();
    }
    optimizer.step().unwrap();
    optimizer.zero_grad();
    of_whole.step().unwrap();
    let check = |model: &Model, what: &str| {
        for (name, variable) in model.variables().into_iter().filter(|(name, _)| Model::is_cut(name)) {
            let expected = &whole.variables()[&name];
            assert_eq!(bytes(&variable), bytes(&piece(expected, rank, world)), "{name} of rank {rank} {what}");
        }
    };
    check(&model, "after a step");

    let (pieces, full) = (folder.join("pieces"), folder.join("full.safetensors"));
    sharded.save_sharded(&pieces, Some(&optimizer), 1).unwrap();
    sharded.save_full(&full).unwrap();
    let mut seen = Vec::new();
    sharded.summon_full(|name, _| seen.push(name.to_owned())).unwrap();
    seen.sort();
    assert_eq!(seen, whole.variables().into_keys().collect::<Vec<_>>());

    let other = Model::new(8);
    let mut sharded = other.shard(&dist);
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    sharded.load_sharded(&pieces, Some(&mut optimizer)).unwrap();
    check(&other, "after `load_sharded`");
    assert_eq!(other.bits(), model.bits());
    let other = Model::new(9);
    other.shard(&dist).load_full(&full).unwrap();
    check(&other, "after `load_full`");

    // And for everybody else.
    let mut other = Model::new(8);
    other.vs.load(&full).unwrap();
    for (name, variable) in other.variables().into_iter().filter(|(name, _)| Model::is_cut(name)) {
        assert_eq!(bytes(&variable), bytes(&whole.variables()[&name]), "{name} after `VarStore::load`");
    }
    dist.shutdown().unwrap();
}

/// A store of two layers with a weight each, and what is given one more name.
fn two(tie: impl FnOnce(&nn::VarStore, [&Tensor; 2])) -> (nn::VarStore, [Tensor; 2]) {
    let vs = nn::VarStore::new(Device::Cpu);
    let weights = ["a", "b"].map(|layer| (vs.root() / layer).var("weight", &[4, 4], RANDOM));
    tie(&vs, [&weights[0], &weights[1]]);
    (vs, weights)
}

/// What building says; nothing may have been cut then.
fn refused(vs: &nn::VarStore, units: &[&str], ignored: &[&str]) -> ShardError {
    let (dist, objects) = (Dist::builder(0, 1).connect().unwrap(), [1u64, 2, 3]);
    let shapes =
        || vs.variables().into_iter().map(|(name, variable)| (name, variable.size())).collect::<BTreeMap<_, _>>();
    let before = shapes();
    let builder = Sharded::builder(&dist, vs);
    let builder = units.iter().zip(&objects).fold(builder, |builder, (prefix, object)| builder.unit(prefix, object));
    let error = ignored.iter().fold(builder, |builder, prefix| builder.ignore(prefix)).build().map(drop).unwrap_err();
    assert_eq!(shapes(), before);
    error
}

#[test]
fn a_tensor_that_two_units_would_share_is_an_error() {
    let says = |error: &ShardError, texts: &[&str]| {
        let text = error.to_string();
        assert!(matches!(error, ShardError::Tied { .. }), "{text}");
        assert!(texts.iter().all(|part| text.contains(part)), "{text:?} does not say {texts:?}");
    };
    let (vs, _) = two(|vs, [a, _]| name(vs, "b.tied", a));
    let both = ["`a.weight` (in unit `a`)", "`b.tied` (in unit `b`)", "below no unit's"];
    says(&refused(&vs, &["a", "b"], &[]), &both);
    says(&refused(&vs, &["a"], &[]), &["`a.weight` (in unit `a`)", "`b.tied` (in no unit)"]);
    says(&refused(&vs, &["b"], &[]), &["`a.weight` (in no unit)", "`b.tied` (in unit `b`)"]);
    says(&refused(&vs, &[], &["b.tied"]), &["`a.weight` (in no unit)", "`b.tied` (ignored)"]);
    says(&refused(&vs, &["a"], &["b"]), &["`a.weight` (in unit `a`)", "`b.tied` (ignored)"]);
    let claimed = refused(&vs, &["a", "b", "b.tied"], &[]);
    assert!(matches!(claimed, ShardError::Claimed { .. }), "{claimed}");

    // As `merge` makes one store of two.
    let one = nn::VarStore::new(Device::Cpu);
    let weight = one.root().var("weight", &[4, 4], RANDOM);
    let other = nn::VarStore::new(Device::Cpu);
    let _ = other.root().add("weight", weight, true);
    let vs = nn::VarStore::merge(vec![(one, Some("a.")), (other, Some("b."))]).unwrap();
    says(&refused(&vs, &["a", "b"], &[]), &["`a.weight` (in unit `a`)", "`b.weight` (in unit `b`)"]);
    let dist = Dist::single();
    Sharded::builder(&dist, &vs).build().unwrap();
}

#[test]
fn variables_that_share_memory_are_an_error() {
    type Share = fn(&Tensor) -> Tensor;
    let ways: [(&str, Share); 5] = [
        ("view", |a| a.view([16])),
        ("narrow", |a| a.narrow(0, 1, 2)),
        ("transposed", Tensor::tr),
        ("detached", Tensor::detach),
        ("detached, and trained", |a| a.detach().set_requires_grad(true)),
    ];
    for (what, share) in ways {
        for trained in [false, true] {
            let (vs, _) = two(|vs, [a, _]| drop((vs.root() / "c").add("shared", share(&a.detach()), trained)));
            for (units, ignored) in [(&["a", "b"][..], &[][..]), (&["a"], &["c"]), (&[], &[])] {
                let error = refused(&vs, units, ignored);
                let text = error.to_string();
                assert!(matches!(error, ShardError::SharedMemory { .. }), "{what}: {text}");
                assert!(text.contains("`a.weight` and `c.shared` share memory"), "{what}: {text}");
            }
            // Where both stay whole they share it as before.
            let dist = Dist::single();
            let _sharded = Sharded::builder(&dist, &vs).ignore("a").ignore("c").build().unwrap();
            tch::no_grad(|| drop(vs.variables()["a.weight"].shallow_clone().fill_(5.0)));
            assert!(vs.variables()["c.shared"].eq(5.0).all().int64_value(&[]) == 1, "{what}");
        }
    }
}

/// So is a parameter that has a history, as one has that was made of another one.
#[test]
fn a_view_with_a_history_is_an_error() {
    let (vs, _) = two(|vs, [_, b]| name(vs, "a.tied", &b.tr()));
    let text = refused(&vs, &["a", "b"], &[]).to_string();
    assert!(text.contains("`a.tied` and `b.weight` share memory"), "{text}");
}

#[test]
fn a_checkpoint_of_other_ties_does_not_fit() {
    let dist = Dist::single();
    let folder = std::env::temp_dir().join(format!("replay-ties-fit-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (tied, _) = two(|vs, [a, _]| name(vs, "c", a));
    let (free, _) = two(|vs, _| drop(vs.root().var("c", &[4, 4], RANDOM)));
    let mut sharded = [&tied, &free].map(|vs| Sharded::builder(&dist, vs).build().unwrap());
    let [of_tied, of_free] = ["tied", "free"].map(|name| folder.join(name));
    sharded[0].save_sharded(&of_tied, None, 0).unwrap();
    sharded[1].save_sharded(&of_free, None, 0).unwrap();
    let text = sharded[1].load_sharded(&of_tied, None).unwrap_err().to_string();
    assert!(text.contains("its `c` is another name of `a.weight`, and the model's is not"), "{text}");
    let text = sharded[0].load_sharded(&of_free, None).unwrap_err().to_string();
    assert!(text.contains("the model's `c` is another name of `a.weight`, and its own is not"), "{text}");

    // A whole file says for each name what it is: where that is one parameter it must be the same.
    let [of_tied, of_free] = ["tied", "free"].map(|name| folder.join(format!("{name}.safetensors")));
    sharded[0].save_full(&of_tied).unwrap();
    sharded[1].save_full(&of_free).unwrap();
    let before: BTreeMap<_, _> = tied.variables().into_iter().map(|(name, tensor)| (name, bytes(&tensor))).collect();
    let text = sharded[0].load_full(&of_free).unwrap_err().to_string();
    assert!(text.contains("its `a.weight` and `c` differ, and are one parameter in the model"), "{text}");
    assert!(tied.variables().iter().all(|(name, tensor)| before[name] == bytes(tensor)));
    sharded[1].load_full(&of_tied).unwrap();
    assert_eq!(bytes(&free.variables()["c"]), before["a.weight"]);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Ranks that have tied otherwise would send each other other things.
#[test]
fn all_ranks_must_tie_the_same() {
    each_rank("all_ranks_must_tie_the_same", &[2], |dist| {
        let (vs, _) = two(|vs, weights| name(vs, "c", weights[dist.rank()]));
        let error = Sharded::builder(&dist, &vs).build().map(drop).unwrap_err().to_string();
        assert!(error.contains("rank 1 is not built as rank 0: the parameters differ"), "{error}");
    });
}
