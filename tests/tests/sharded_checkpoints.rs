//! Guarantee *sharded*, over interruptions: what was saved is there whole or not at all, for any number of processes, and training
//! goes on as if it had not stopped.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use replay_runtime::dist::Dist;
use replay_runtime::{CheckpointError, Optimizer, Rollout, Sharded, replay_block};
use replay_tests::ranks::{case, each_rank, own_builder, piece, run, texts};
use replay_tests::{bytes, randn};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

struct Layer {
    linear: nn::Linear,
    scale: Tensor,
    mean: Tensor,
    ignored: Tensor,
}

impl Layer {
    #[replay_block(buffers)]
    fn forward(&self, x: &Tensor) -> Tensor {
        let h = self.linear.forward(x).tanh().dropout(0.3, true) * &self.scale + &self.ignored;
        let mean = h.detach().mean_dim(0, false, h.kind());
        tch::no_grad(|| self.mean.shallow_clone().copy_(&(&self.mean * 0.5 + mean)));
        x + h + &self.mean * 0.01
    }
}

struct Model {
    vs: nn::VarStore,
    layers: Vec<Layer>,
    head: Tensor,
}

impl Model {
    fn new(seed: i64) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let layer = |i: usize| {
            let path = vs.root() / "layers" / i;
            Layer {
                linear: nn::linear(&path, 5, 5, nn::LinearConfig::default()),
                scale: path.var("scale", &[], nn::Init::Const(1.1)),
                mean: path.zeros_no_train("mean", &[5]),
                ignored: path.var("ignored", &[5], nn::Init::Randn { mean: 0.0, stdev: 0.1 }),
            }
        };
        let layers = (0..2).map(layer).collect();
        let head = vs.root().var("head", &[5, 3], nn::Init::Randn { mean: 0.0, stdev: 0.3 });
        let _unused = vs.root().var("unused", &[2], nn::Init::Const(0.5));
        Self { vs, layers, head }
    }

    fn shard<'d>(&self, dist: &'d Dist) -> Sharded<'d> {
        let mut builder = Sharded::builder(dist, &self.vs);
        for (i, layer) in self.layers.iter().enumerate() {
            builder = builder.unit(&format!("layers.{i}"), layer).ignore(&format!("layers.{i}.ignored"));
        }
        builder.build().unwrap()
    }

    fn variables(&self) -> BTreeMap<String, Tensor> {
        self.vs.variables().into_iter().collect()
    }

    /// Their bits in a world of one, in whatever shape.
    fn values(&self) -> BTreeMap<String, Vec<u8>> {
        self.variables().into_iter().map(|(name, variable)| (name, bytes(&variable.reshape(-1)))).collect()
    }

    fn bits(&self) -> BTreeMap<String, Vec<u8>> {
        self.variables().into_iter().map(|(name, variable)| (name, bytes(&variable))).collect()
    }

    /// A step of training, with a batch and dropout from this rank's own generator; the bits of its loss.
    fn step(&self, sharded: &Sharded<'_>, optimizer: &mut Optimizer, step: i32) -> u64 {
        let rollout = Rollout::new(sharded);
        let mut x = Tensor::randn([4, 5], (Kind::Float, Device::Cpu));
        for layer in &self.layers {
            x = layer.forward_replay(&rollout, &x).unwrap();
        }
        let loss = x.matmul(&self.head).square().mean(Kind::Float);
        rollout.backward(&loss).unwrap();
        optimizer.set_lr(1e-2 / f64::from(step + 3)).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad();
        f64::try_from(loss).unwrap().to_bits()
    }
}

/// A folder for one test, gone when it ends.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("replay-checkpoints-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn run(&self, test: &str, what: &str, world: usize) {
        let ended = run(test, &format!("{what} {}", self.0.display()), world, |_, _| ());
        assert!(ended.iter().all(|rank| rank.status.success()), "{what}, {world} ranks:\n{}", texts(&ended));
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// In a process that was started as a rank: what it is to do, and where.
fn task() -> Option<(Dist, String, PathBuf)> {
    let dist = own_builder()?.connect().unwrap();
    let case = case();
    let (what, folder) = case.split_once(' ').unwrap();
    Some((dist, what.to_owned(), PathBuf::from(folder)))
}

#[test]
fn training_goes_on_as_if_it_had_not_stopped() {
    const NAME: &str = "training_goes_on_as_if_it_had_not_stopped";
    let Some((dist, _, folder)) = task() else {
        for world in [1, 2, 3] {
            Folder::new(NAME).run(NAME, "train", world);
        }
        return;
    };
    let path = folder.join("step-2");
    let seed = i64::try_from(dist.rank()).unwrap();
    let model = Model::new(3);
    let sharded = model.shard(&dist);
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    tch::manual_seed(seed);
    let mut losses = Vec::new();
    for step in 0..4 {
        if step == 2 {
            sharded.save_sharded(&path, Some(&optimizer), 2).unwrap();
        }
        losses.push(model.step(&sharded, &mut optimizer, step));
    }

    let other = Model::new(4);
    let mut sharded = other.shard(&dist);
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 0.5).unwrap();
    tch::manual_seed(77);
    let loaded = sharded.load_sharded(&path, Some(&mut optimizer)).unwrap();
    assert_eq!((loaded.step, loaded.world, loaded.generators), (2, dist.world(), true));
    // What was set before the second step.
    assert_eq!(optimizer.lr(0).unwrap().to_bits(), (1e-2 / 4.0_f64).to_bits());
    let again: Vec<_> = (2..4).map(|step| other.step(&sharded, &mut optimizer, step)).collect();
    assert_eq!(again, losses[2..]);
    assert_eq!(other.bits(), model.bits());
    dist.shutdown().unwrap();
}

/// A step whose gradients do not depend on how many processes there are.
fn step_by_hand(model: &Model, optimizer: &mut Optimizer, step: i64, rank: usize, world: usize) {
    for (i, (name, variable)) in model.variables().into_iter().enumerate() {
        if variable.requires_grad() && name != "unused" {
            let whole = Model::new(0).variables().remove(&name).unwrap();
            let slope = randn(1000 * step + i64::try_from(i).unwrap(), &whole.size(), Kind::Float);
            let slope = if variable.size() == whole.size() { slope } else { piece(&slope, rank, world) };
            (&variable * slope.view_as(&variable)).sum(Kind::Float).backward();
        }
    }
    optimizer.step().unwrap();
    optimizer.zero_grad();
}

fn algorithms() -> [replay_runtime::Algorithm; 3] {
    let sgd = nn::Sgd { momentum: 0.9, ..nn::Sgd::default() };
    let rms = nn::RmsProp { momentum: 0.5, centered: true, ..nn::RmsProp::default() };
    [nn::Adam { amsgrad: true, ..nn::Adam::default() }.into(), sgd.into(), rms.into()]
}

#[test]
fn any_number_of_processes_loads_what_any_other_has_saved() {
    const NAME: &str = "any_number_of_processes_loads_what_any_other_has_saved";
    let Some((dist, what, folder)) = task() else {
        for from in 1..=4 {
            let folder = Folder::new(NAME);
            folder.run(NAME, "save", from);
            for to in 1..=4 {
                folder.run(NAME, &format!("load-from-{from}"), to);
            }
        }
        return;
    };
    let (rank, world) = (dist.rank(), dist.world());
    for (i, algorithm) in algorithms().into_iter().enumerate() {
        let path = folder.join(format!("algorithm-{i}"));
        let whole = Model::new(3);
        let mut whole_optimizer = Optimizer::new(&whole.vs, algorithm, 1e-2).unwrap();
        let model = Model::new(if what == "save" { 3 } else { 4 });
        let mut sharded = model.shard(&dist);
        let mut optimizer = Optimizer::new(&sharded, algorithm, 1e-2).unwrap();
        for step in 0..2 {
            step_by_hand(&whole, &mut whole_optimizer, step, 0, 1);
            if what == "save" {
                step_by_hand(&model, &mut optimizer, step, rank, world);
            }
        }
        if what == "save" {
            sharded.save_sharded(&path, Some(&optimizer), 2).unwrap();
        } else {
            let loaded = sharded.load_sharded(&path, Some(&mut optimizer)).unwrap();
            assert_eq!(what, format!("load-from-{}", loaded.world));
            assert_eq!(loaded.generators, loaded.world == world);
        }
        for step in 2..4 {
            for (name, variable) in model.variables() {
                let expected = &whole.variables()[&name];
                let is_piece = variable.requires_grad() && !name.ends_with("ignored");
                let expected = if is_piece { piece(expected, rank, world) } else { expected.shallow_clone() };
                assert_eq!(bytes(&variable), bytes(&expected), "{name} of rank {rank}");
            }
            step_by_hand(&whole, &mut whole_optimizer, step, 0, 1);
            step_by_hand(&model, &mut optimizer, step, rank, world);
        }
    }
    dist.shutdown().unwrap();
}

/// A small checkpoint of two steps, by this process.
fn saved(path: &Path, dist: &Dist, seed: i64) -> Model {
    let model = Model::new(seed);
    let sharded = model.shard(dist);
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    step_by_hand(&model, &mut optimizer, 0, 0, 1);
    sharded.save_sharded(path, Some(&optimizer), 1).unwrap();
    model
}

/// What loading says; nothing may have changed then.
fn refused(path: &Path, dist: &Dist) -> CheckpointError {
    let model = Model::new(9);
    let mut sharded = model.shard(dist);
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 0.25).unwrap();
    let (before, draw) = (model.bits(), || bytes(&Tensor::rand([4], (Kind::Float, Device::Cpu))));
    tch::manual_seed(5);
    let expected = draw();
    tch::manual_seed(5);
    let error = sharded.load_sharded(path, Some(&mut optimizer)).unwrap_err();
    assert_eq!(draw(), expected);
    assert_eq!(model.bits(), before);
    assert_eq!(optimizer.lr(0).unwrap().to_bits(), 0.25_f64.to_bits());
    let other = Model::new(9);
    let mut fresh = Optimizer::new(&other.vs, nn::AdamW::default(), 0.25).unwrap();
    step_by_hand(&model, &mut optimizer, 0, 0, 1);
    step_by_hand(&other, &mut fresh, 0, 0, 1);
    assert_eq!(model.values(), other.values());
    error
}

#[test]
fn what_is_not_whole_is_not_loaded() {
    let (folder, dist) = (Folder::new("torn"), Dist::single());
    let [one, two] = ["one", "two"].map(|name| folder.0.join(name));
    saved(&one, &dist, 3);
    saved(&two, &dist, 4);
    let rank = "rank_0.safetensors";
    let copy = |name: &str| {
        let path = folder.0.join(name);
        fs::create_dir(&path).unwrap();
        for file in [rank, "meta.json"] {
            fs::copy(one.join(file), path.join(file)).unwrap();
        }
        path
    };
    let says = |path: &Path, text: &str| {
        let found = refused(path, &dist).to_string();
        assert!(found.contains(text), "{found:?} does not say {text:?}");
    };

    says(&folder.0.join("nowhere"), "no complete checkpoint");
    let path = copy("no-meta");
    fs::remove_file(path.join("meta.json")).unwrap();
    says(&path, "no complete checkpoint");
    let path = copy("no-file");
    fs::remove_file(path.join(rank)).unwrap();
    says(&path, "could not open");
    let path = copy("of-another");
    fs::copy(two.join(rank), path.join(rank)).unwrap();
    says(&path, "of another save");

    let whole = fs::read(one.join(rank)).unwrap();
    let path = copy("short");
    for length in [0, 4, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(path.join(rank), &whole[..length]).unwrap();
        let error = refused(&path, &dist).to_string();
        assert!(error.contains(rank), "{length} bytes: {error}");
    }
    fs::write(path.join(rank), [&whole[..], &[0]].concat()).unwrap();
    says(&path, "bytes, and should have");

    let meta = fs::read_to_string(one.join("meta.json")).unwrap();
    let path = copy("meta");
    for (from, to, text) in [
        ("\"format\": 1", "\"format\": 2", "format 2"),
        ("\"world\": 1", "\"world\": 2", "processes"),
        ("\"layers.0.weight\"", "\"layers.0.wait\"", "layers.0.wei"),
        ("{", "", "cannot be read"),
    ] {
        assert!(meta.contains(from), "{meta}");
        fs::write(path.join("meta.json"), meta.replacen(from, to, 1)).unwrap();
        says(&path, text);
    }
    // The state of the last parameter is not complete: those before it have been set by then.
    let last = meta.rfind("\"exp_avg_sq\"").unwrap();
    let comma = meta[..last].rfind(',').unwrap();
    fs::write(path.join("meta.json"), meta[..comma].to_owned() + &meta[last + 12..]).unwrap();
    says(&path, "has no `exp_avg_sq`");
    fs::write(path.join("meta.json"), &meta[..meta.len() / 2]).unwrap();
    says(&path, "cannot be read");
    // And what is whole is loaded.
    let model = Model::new(9);
    model.shard(&dist).load_sharded(&one, None).unwrap();
    assert_eq!(model.bits(), saved(&folder.0.join("three"), &dist, 3).bits());
}

/// The header of a rank's file says what that of no save does, and is consistent in itself.
#[test]
fn what_a_rank_has_whole_is_compared_before_anything_is_changed() {
    let (folder, dist) = (Folder::new("header"), Dist::single());
    let path = folder.0.join("one");
    saved(&path, &dist, 3);
    let [rank, meta] = ["rank_0.safetensors", "meta.json"].map(|file| path.join(file));
    let (file, about) = (fs::read(&rank).unwrap(), fs::read_to_string(&meta).unwrap());
    let end = 8 + usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header = std::str::from_utf8(&file[8..end]).unwrap();
    for (name, from, to, text) in [
        ("variable/head", "\"dtype\":\"F32\"", "\"dtype\":\"I32\"", "Int [15], where Float [15] is expected"),
        ("variable/layers.1.mean", "\"shape\":[5]", "\"shape\":[5,1]", "Float [5, 1], where Float [5] is expected"),
        ("variable/layers.1.mean", "\"dtype\":\"F32\"", "\"dtype\":\"I32\"", "Int [5], where Float [5] is expected"),
        ("variable/layers.1.ignored", "\"shape\":[5]", "\"shape\":[1,5]", "Float [1, 5], where Float [5] is expected"),
        ("generator/cpu", "\"shape\":[", "\"shape\":[1,", "Uint8 [1, "),
        ("generator/cpu", "\"dtype\":\"U8\"", "\"dtype\":\"I8\"", "where Uint8 ["),
    ] {
        // Of that tensor, between its name and the end of what is said of it.
        let begin = header.find(&format!("\"{name}\":{{")).unwrap();
        let length = header[begin..].find('}').unwrap();
        let said = &header[begin..begin + length];
        assert!(said.contains(from), "{said}");
        let changed = header.replacen(said, &said.replacen(from, to, 1), 1);
        let length = u64::try_from(changed.len()).unwrap().to_le_bytes();
        let damaged = [&length[..], changed.as_bytes(), &file[end..]].concat();
        let bytes = |length: usize| format!("    {length}\n");
        assert!(about.contains(&bytes(file.len())), "{about}");
        fs::write(&meta, about.replacen(&bytes(file.len()), &bytes(damaged.len()), 1)).unwrap();
        fs::write(&rank, damaged).unwrap();
        let error = refused(&path, &dist).to_string();
        let name = name.trim_start_matches("variable/");
        assert!(error.contains(&format!("has a `{name}` of ")) && error.contains(text), "{name}, {to}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (folder, dist) = (Folder::new("fits"), Dist::single());
    let path = folder.0.join("one");
    saved(&path, &dist, 3);
    let model = Model::new(9);
    let mut sharded = model.shard(&dist);
    let mut load = |algorithm: replay_runtime::Algorithm, text: &str| {
        let mut optimizer = Optimizer::new(&sharded, algorithm, 0.1).unwrap();
        let before = model.bits();
        let error = sharded.load_sharded(&path, Some(&mut optimizer)).unwrap_err().to_string();
        assert!(error.contains(text), "{error:?} does not say {text:?}");
        assert_eq!(model.bits(), before);
    };
    load(nn::Adam::default().into(), "saved with AdamW, and the optimizer is Adam");
    load(nn::AdamW { amsgrad: true, ..nn::AdamW::default() }.into(), "max_exp_avg_sq");

    let vs = nn::VarStore::new(Device::Cpu);
    let _head = vs.root().var("head", &[5, 3], nn::Init::Const(0.0));
    let error = Sharded::builder(&dist, &vs).build().unwrap().load_sharded(&path, None).unwrap_err();
    assert!(error.to_string().contains("it has a parameter `layers.0.bias`, and the model has not"), "{error}");
    let vs = nn::VarStore::new(Device::Cpu);
    let _head = vs.root().var("head", &[5, 4], nn::Init::Const(0.0));
    let error = Sharded::builder(&dist, &vs).build().unwrap().load_sharded(&path, None).unwrap_err();
    assert!(error.to_string().contains("`head` is Float [5, 3], and the model's Float [5, 4]"), "{error}");

    let bare = folder.0.join("bare");
    sharded.save_sharded(&bare, None, 0).unwrap();
    assert!(refused(&bare, &dist).to_string().contains("saved without an optimizer"));
    let error = sharded.save_sharded(&bare, None, 0).unwrap_err();
    assert!(matches!(&error, CheckpointError::Exists { path } if *path == bare), "{error}");
    let file = folder.0.join("file");
    fs::write(&file, "").unwrap();
    let error = sharded.save_sharded(file.join("one"), None, 0).unwrap_err();
    assert!(error.to_string().contains("could not create"), "{error}");
    let error = sharded.save_sharded("/", None, 0).unwrap_err();
    assert!(error.to_string().contains("names no folder"), "{error}");

    let rollout = Rollout::new(&sharded);
    for error in [sharded.save_sharded(folder.0.join("open"), None, 0), sharded.save_full(folder.0.join("open"))] {
        assert!(error.unwrap_err().to_string().contains("a rollout of this store lives"));
    }
    drop(rollout);
    assert!(!folder.0.join("open").exists() && !folder.0.join("open.tmp").exists());
}

/// What one rank cannot do is an error on all of them, and they can go on.
#[test]
fn a_failure_of_one_is_one_of_all() {
    const NAME: &str = "a_failure_of_one_is_one_of_all";
    let Some((dist, _, folder)) = task() else {
        return Folder::new(NAME).run(NAME, "fail", 3);
    };
    let rank = dist.rank();
    let model = Model::new(3);
    let mut sharded = model.shard(&dist);
    let optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    let path = folder.join("one");
    sharded.save_sharded(&path, Some(&optimizer), 1).unwrap();

    let text = sharded.save_sharded(&path, Some(&optimizer), 1).unwrap_err().to_string();
    let expected = if rank == 0 { "exists already" } else { "rank 0 could not do its part: `" };
    assert!(text.contains(expected), "{text}");
    let text = sharded.save_sharded(folder.join("two"), None, u64::from(rank == 1)).unwrap_err().to_string();
    assert!(text.contains("rank 1 has another step"), "{text}");
    let rate = if rank == 2 { 0.5 } else { 0.25 };
    let other = Optimizer::new(&sharded, nn::AdamW::default(), rate).unwrap();
    let text = sharded.save_sharded(folder.join("two"), Some(&other), 1).unwrap_err().to_string();
    assert!(text.contains("rank 2 has another state of its optimizer"), "{text}");
    let elsewhere = if rank == 1 { folder.join("nowhere") } else { path.clone() };
    let text = sharded.load_sharded(&elsewhere, None).unwrap_err().to_string();
    let expected =
        if rank == 1 { "there is no complete checkpoint" } else { "rank 1 could not do its part: there is no" };
    assert!(text.contains(expected), "{text}");
    let text = sharded.save_full(folder.join("no/folder")).unwrap_err().to_string();
    assert!(text.contains(if rank == 0 { "could not create" } else { "rank 0 could not do its part" }), "{text}");
    let text = sharded.load_full(folder.join("nowhere")).unwrap_err().to_string();
    assert!(text.contains(if rank == 0 { "could not open" } else { "rank 0 could not do its part" }), "{text}");

    dist.barrier().unwrap();
    let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["one"]);
    let before = model.bits();
    assert_eq!(sharded.load_sharded(&path, None).unwrap().step, 1);
    assert_eq!(model.bits(), before);
    dist.shutdown().unwrap();
}

/// A process that is killed at any time leaves only checkpoints that can be loaded.
#[test]
fn a_save_that_is_killed_leaves_nothing() {
    const NAME: &str = "a_save_that_is_killed_leaves_nothing";
    if let Some((dist, what, folder)) = task() {
        let model = Model::new(3);
        let mut sharded = model.shard(&dist);
        let optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
        if what == "save" {
            for step in 0.. {
                if sharded.save_sharded(folder.join(format!("step-{step}")), Some(&optimizer), step).is_err() {
                    std::process::exit(3);
                }
            }
        }
        let (saved, mut count) = (model.bits(), 0);
        for entry in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            tch::no_grad(|| {
                model.vs.variables().values().for_each(|variable| drop(variable.shallow_clone().fill_(7.0)));
            });
            let other = model.bits();
            let loaded = sharded.load_sharded(&entry, None);
            // One beside its place is all there, and waits for its name, or it is none.
            if loaded.is_err() && entry.extension().is_some_and(|extension| extension == "tmp") {
                assert_eq!(model.bits(), other);
                continue;
            }
            assert!(entry.with_extension("").ends_with(format!("step-{}", loaded.unwrap().step)));
            assert_eq!(model.bits(), saved);
            count += 1;
        }
        println!("{count} complete checkpoints");
        assert!(count > 0);
        return;
    }
    for round in 0..6u64 {
        let folder = Folder::new(NAME);
        let victim = usize::try_from(round % 2).unwrap();
        let mut killed = false;
        // When the first checkpoint is there, and a little later.
        let mut since = None;
        run(NAME, &format!("save {}", folder.0.display()), 2, |children, time| {
            if since.is_none() && folder.0.join("step-0").exists() {
                since = Some(time);
            }
            if !killed && since.is_some_and(|since| time > since + Duration::from_millis(23 * round)) {
                children[victim].kill().unwrap();
                killed = true;
            }
        });
        assert!(killed);
        folder.run(NAME, "load", 1);
    }
}

#[test]
fn whole_files_are_those_of_a_var_store() {
    const NAME: &str = "whole_files_are_those_of_a_var_store";
    let Some((dist, _, folder)) = task() else {
        for world in [1, 2, 3] {
            Folder::new(NAME).run(NAME, "full", world);
        }
        return;
    };
    let (rank, world) = (dist.rank(), dist.world());
    let whole = Model::new(3);
    let model = Model::new(3);
    let mut sharded = model.shard(&dist);
    let path = folder.join("full.safetensors");
    for _ in 0..2 {
        sharded.save_full(&path).unwrap();
    }
    let mut read = Model::new(8);
    read.vs.load(&path).unwrap();
    assert_eq!(read.bits(), whole.bits());
    let mut seen = BTreeMap::new();
    sharded.summon_full(|name, tensor| drop(seen.insert(name.to_owned(), bytes(tensor)))).unwrap();
    assert_eq!(seen, whole.bits());

    // From a file of tch's own, which rank 0 alone sees, in another kind.
    let mut other = Model::new(8);
    other.vs.double();
    let path = folder.join(if rank == 0 { "double.safetensors" } else { "nowhere.safetensors" });
    if rank == 0 {
        other.vs.save(&path).unwrap();
    }
    let other = Model::new(8);
    sharded.load_full(&path).unwrap();
    for (name, variable) in model.variables() {
        let expected = &other.variables()[&name];
        let is_piece = variable.requires_grad() && !name.ends_with("ignored");
        let expected = if is_piece { piece(expected, rank, world) } else { expected.shallow_clone() };
        assert_eq!(bytes(&variable), bytes(&expected), "{name} of rank {rank}");
    }
    dist.barrier().unwrap();
    let mut small = nn::VarStore::new(Device::Cpu);
    let _head = small.root().var("head", &[5, 3], nn::Init::Const(0.0));
    small.float();
    if rank == 0 {
        small.save(&path).unwrap();
    }
    let before = model.bits();
    let text = sharded.load_full(&path).unwrap_err().to_string();
    assert!(text.contains(if rank == 0 { "it has no `" } else { "rank 0 could not do its part" }), "{text}");
    assert_eq!(model.bits(), before);
    dist.shutdown().unwrap();
}

#[test]
fn all_ranks_must_do_it() {
    each_rank("all_ranks_must_do_it", &[2], |dist| {
        let model = Model::new(3);
        let sharded = model.shard(&dist);
        let outcome = if dist.rank() == 0 {
            sharded.save_full(std::env::temp_dir().join("never")).map_err(|error| error.to_string())
        } else {
            dist.barrier().map_err(|error| error.to_string())
        };
        let text = outcome.unwrap_err();
        assert!(text.contains("rank 0: save") && text.contains("rank 1: barrier"), "{text}");
    });
}
