//! Guarantee *sharded*, for what went wrong for people who train with other sharding libraries, as far as public reports say: those
//! of the table in `tests/README.md` that no other file of tests reproduces already.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use replay_runtime::dist::Dist;
use replay_runtime::{Optimizer, Rollout, Sharded, replay_block};
use replay_tests::ranks::{each_rank, piece};
use replay_tests::{bytes, randn};
use tch::nn::{self, Init};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

/// A parameter that a batch is multiplied by: the gradient of the sum is the batch.
struct Scale(Tensor);

impl Scale {
    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        x * &self.0
    }
}

fn scale(kind: Kind, size: i64) -> (nn::VarStore, Scale) {
    let mut vs = nn::VarStore::new(CPU);
    let scale = Scale(vs.root().var("scale", &[size], Init::Const(1.0)));
    if kind == Kind::BFloat16 {
        vs.bfloat16();
    }
    (vs, scale)
}

/// <https://github.com/pytorch/pytorch/issues/72548>: each rank clipped by the norm of its own pieces, and so by a factor of its own.
#[test]
fn every_rank_clips_by_the_norm_of_all() {
    each_rank("every_rank_clips_by_the_norm_of_all", &[1, 2, 4], |dist| {
        let (vs, scale) = scale(Kind::Float, 4);
        let sharded = Sharded::builder(&dist, &vs).unit("scale", &scale).build().unwrap();
        // Of the pieces of two ranks the one has nearly all of the norm.
        let gradient = Tensor::from_slice(&[3f32, 0.0, 0.001, 4.0]);
        let rollout = Rollout::new(&sharded);
        let y = scale.forward_replay(&rollout, &gradient).unwrap();
        rollout.backward(&y.sum(Kind::Float)).unwrap();
        let norm = sharded.clip_grad_norm(0.5).unwrap();
        let expected = gradient.to_kind(Kind::Double).norm().double_value(&[]);
        assert!((norm - expected).abs() < 1e-9, "{norm} {expected}");
        let clipped = &gradient * (0.5 / (norm + 1e-6));
        assert_eq!(bytes(&scale.0.grad()), bytes(&piece(&clipped, dist.rank(), dist.world())));
        dist.shutdown().unwrap();
    });
}

/// <https://github.com/verl-project/verl/issues/6176>: ranks had different numbers of micro-batches, and waited for each other for ever.
#[test]
fn another_number_of_micro_batches_is_an_error_at_once() {
    each_rank("another_number_of_micro_batches_is_an_error_at_once", &[2, 3], |dist| {
        let (vs, scale) = scale(Kind::Float, 4);
        let sharded = Sharded::builder(&dist, &vs).unit("scale", &scale).build().unwrap();
        let micro_batch = || {
            let rollout = Rollout::new(&sharded);
            let y = scale.forward_replay(&rollout, &randn(1, &[4], Kind::Float))?;
            rollout.backward(&y.sum(Kind::Float)).map(drop)
        };
        let mine = 3 + dist.rank() as u64;
        // Who asks first does as many as all of them can.
        for _ in 0..dist.agree_steps(mine).unwrap() {
            micro_batch().unwrap();
        }
        dist.barrier().unwrap();
        let started = Instant::now();
        let outcome = (0..mine).try_for_each(|_| micro_batch()).map_err(|error| error.to_string());
        let outcome = outcome.and_then(|()| sharded.grad_norm().map(drop).map_err(|error| error.to_string()));
        let text = outcome.unwrap_err();
        assert!(text.contains("rank 0: all_gather") && text.contains("rank 1: gather of `scale`"), "{text}");
        assert!(started.elapsed() < Duration::from_secs(10), "it took {:?}", started.elapsed());
    });
}

/// <https://github.com/pytorch/pytorch/issues/122903> and <https://github.com/pytorch/pytorch/issues/143536>: a save that one rank alone
/// begins never ends.
#[test]
fn what_one_rank_alone_begins_ends_on_all() {
    const NAMES: [&str; 5] = ["save_sharded", "load_sharded", "save_full", "load_full", "summon_full"];
    let path = std::env::temp_dir().join("replay-reports-never");
    each_rank("what_one_rank_alone_begins_ends_on_all", &[2], |dist| {
        // A group is of no more use after it, so each has its own.
        let group = |name: &str| {
            let builder = replay_tests::ranks::own_builder().unwrap().prefix(name);
            builder.connect().unwrap()
        };
        for name in NAMES {
            let group = group(name);
            let (vs, scale) = scale(Kind::Float, 4);
            let mut sharded = Sharded::builder(&group, &vs).unit("scale", &scale).build().unwrap();
            let text = if dist.rank() == 1 {
                group.barrier().unwrap_err().to_string()
            } else {
                let outcome = match name {
                    "save_sharded" => sharded.save_sharded(&path, None, 0),
                    "load_sharded" => sharded.load_sharded(&path, None).map(drop),
                    "save_full" => sharded.save_full(&path),
                    "load_full" => sharded.load_full(&path),
                    _ => sharded.summon_full(|_, _| ()),
                };
                outcome.unwrap_err().to_string()
            };
            assert!(text.contains("do not do the same") && text.contains("rank 1: barrier"), "{name}: {text}");
            assert!(!path.exists());
        }
        dist.shutdown().unwrap();
    });
}

/// <https://github.com/pytorch/pytorch/issues/106395>: gradients added up in bf16 lose what is small beside the sum so far, the more the
/// more ranks there are.
#[test]
fn gradients_of_bf16_are_added_up_in_f32() {
    each_rank("gradients_of_bf16_are_added_up_in_f32", &[4], |dist| {
        let (vs, scale) = scale(Kind::BFloat16, 1);
        let sharded = Sharded::builder(&dist, &vs).unit("scale", &scale).build().unwrap();
        // In bf16 256 + 1 is 256: the sum over the ranks would be 258, and the mean 64.5 and not 65.
        let batch = Tensor::from_slice(&[[256f32, 1.0, 1.0, 2.0][dist.rank()]]).to_kind(Kind::BFloat16);
        let rollout = Rollout::new(&sharded);
        let mut sum = Tensor::zeros([1], (Kind::BFloat16, CPU));
        // Each use of the unit has its mean, and these are added up too.
        for _ in 0..4 {
            sum += scale.forward_replay(&rollout, &batch).unwrap();
        }
        rollout.backward(&sum.sum(Kind::BFloat16)).unwrap();
        let grad = scale.0.grad();
        assert_eq!((grad.kind(), grad.numel()), (Kind::BFloat16, usize::from(dist.rank() == 0)));
        if dist.rank() == 0 {
            assert_eq!(grad.double_value(&[0]).to_bits(), 260f64.to_bits());
        }
        dist.shutdown().unwrap();
    });
}

struct WithBuffers {
    vs: nn::VarStore,
    weight: Tensor,
    mean: Tensor,
}

impl WithBuffers {
    fn new(seed: i64) -> Self {
        tch::manual_seed(seed);
        let random = Init::Randn { mean: 0.0, stdev: 1.0 };
        let vs = nn::VarStore::new(CPU);
        let weight = vs.root().var("weight", &[5], random);
        let _ignored = vs.root().var("ignored", &[3], random);
        let mean = vs.root().add("mean", Tensor::randn([6], (Kind::Float, CPU)), false);
        let _counts = vs.root().add("counts", Tensor::from_slice(&[seed, seed + 1]), false);
        // A view: its values are not where a vector's would be.
        let strided = Tensor::randn([4, 3], (Kind::Float, CPU)).tr();
        let _strided = vs.root().add("strided", strided, false);
        let _none = vs.root().add("none", Tensor::zeros([0], (Kind::Float, CPU)), false);
        Self { vs, weight, mean }
    }

    fn whole(sharded: &Sharded<'_>) -> BTreeMap<String, Vec<u8>> {
        let mut seen = BTreeMap::new();
        sharded.summon_full(|name, tensor| drop(seen.insert(name.to_owned(), bytes(tensor)))).unwrap();
        seen
    }

    fn bits(&self) -> BTreeMap<String, Vec<u8>> {
        self.vs.variables().into_iter().map(|(name, variable)| (name, bytes(&variable))).collect()
    }
}

/// <https://github.com/pytorch/pytorch/pull/178569>: buffers of some ranks were never initialised;
/// <https://github.com/hiyouga/LlamaFactory/pull/10820>: some buffers were left out. Each rank makes its own numbers here.
#[test]
fn all_ranks_begin_with_the_values_of_the_first() {
    each_rank("all_ranks_begin_with_the_values_of_the_first", &[1, 2, 3], |dist| {
        let rank = i64::try_from(dist.rank()).unwrap();
        let (own, first) = (WithBuffers::new(40 + rank).bits(), WithBuffers::new(40).bits());
        let model = WithBuffers::new(40 + rank);
        let sharded = Sharded::builder(&dist, &model.vs).ignore("ignored").build().unwrap();
        assert_eq!(WithBuffers::whole(&sharded), first);
        assert_eq!(bytes(&model.mean), first["mean"]);
        drop(sharded);

        // Who says that they have them already keeps the own ones.
        let model = WithBuffers::new(40 + rank);
        let builder = Sharded::builder(&dist, &model.vs).ignore("ignored").sync_from_rank0(false);
        let sharded = builder.build().unwrap();
        let found = WithBuffers::whole(&sharded);
        for name in ["mean", "counts", "strided", "ignored"] {
            assert_eq!(found[name], own[name], "{name}");
        }
        let whole = Tensor::from_data_size(&own["weight"], &[5], Kind::Float);
        assert_eq!(bytes(&model.weight), bytes(&piece(&whole, dist.rank(), dist.world())));
        dist.shutdown().unwrap();
    });
}

struct Frozen {
    adapter: Tensor,
    base: Vec<Tensor>,
}

impl Frozen {
    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        self.base.iter().fold(x * &self.adapter, |x, base| (x * base).tanh())
    }
}

/// <https://github.com/pytorch/pytorch/issues/91165>: a unit that is mostly frozen took more memory than one that is trained. Frozen
/// parameters get no gradient, and nobody sends one.
#[test]
fn what_is_frozen_costs_its_piece_alone() {
    each_rank("what_is_frozen_costs_its_piece_alone", &[1, 2, 3], |dist| {
        let peak = |frozen: bool| {
            let vs = nn::VarStore::new(CPU);
            let random = Init::Randn { mean: 0.0, stdev: 1.0 };
            let layer = vs.root() / "layer";
            let base = (0..8).map(|i| layer.var(&format!("base{i}"), &[64], random)).collect();
            let layer = Frozen { adapter: layer.var("adapter", &[64], random), base };
            for base in layer.base.iter().filter(|_| frozen) {
                let _ = base.set_requires_grad(false);
            }
            let sharded = Sharded::builder(&dist, &vs).unit("layer", &layer).build().unwrap();
            let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
            let before: Vec<_> = layer.base.iter().map(bytes).collect();
            for _ in 0..2 {
                let rollout = Rollout::new(&sharded);
                let y = layer.forward_replay(&rollout, &randn(5, &[64], Kind::Float)).unwrap();
                rollout.backward(&y.sum(Kind::Float)).unwrap();
                assert!(layer.adapter.grad().defined());
                assert!(layer.base.iter().all(|base| base.grad().defined() != frozen));
                optimizer.step().unwrap();
                optimizer.zero_grad();
            }
            // Weight decay has not come to them either, and there is no state of them in a checkpoint.
            let same = layer.base.iter().map(bytes).eq(before);
            assert_eq!(same, frozen);
            (sharded.memory_report().gathered_peak, states(&dist, &sharded, &optimizer))
        };
        let (of_trained, of_frozen) = (peak(false), peak(true));
        assert_eq!(of_frozen.0, of_trained.0);
        assert_eq!((of_trained.1, of_frozen.1), (9, 1));
        dist.shutdown().unwrap();
    });
}

/// Of how many parameters a checkpoint has a state.
fn states(dist: &Dist, sharded: &Sharded<'_>, optimizer: &Optimizer) -> usize {
    // The process that started the ranks is the parent of all of them.
    let folder = std::env::temp_dir().join(format!("replay-reports-{}", std::os::unix::process::parent_id()));
    sharded.save_sharded(&folder, Some(optimizer), 2).unwrap();
    let meta = std::fs::read_to_string(folder.join("meta.json")).unwrap();
    dist.barrier().unwrap();
    if dist.rank() == 0 {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    dist.barrier().unwrap();
    meta.matches("\"step\": 2,\n").count() - 1
}

/// <https://github.com/pytorch/pytorch/pull/176225>: ties were found by the number of an object, and numbers of what is gone were given
/// out again.
#[test]
fn memory_that_is_used_again_is_no_tie() {
    let dist = Dist::single();
    let mut places = BTreeMap::<usize, usize>::new();
    for round in 0..200 {
        let vs = nn::VarStore::new(CPU);
        let layer = |name: &str| {
            // One that is gone at once leaves its place to the next.
            drop(vs.root().randn_standard("left", &[3, 3]));
            vs.variables_.lock().unwrap().named_variables.remove("left");
            vs.variables_.lock().unwrap().trainable_variables.pop();
            Scale((vs.root() / name).randn_standard("weight", &[3, 3]))
        };
        let layers = ["a", "b", "c"].map(layer);
        for layer in &layers {
            *places.entry(layer.0.data_ptr().addr()).or_default() += 1;
        }
        let builder = Sharded::builder(&dist, &vs).unit("a", &layers[0]).unit("b", &layers[1]);
        if let Err(error) = builder.build() {
            panic!("round {round}: {error}");
        }
    }
    assert!(places.values().any(|&times| times > 1), "no place was used again, and the test tests nothing");
}
