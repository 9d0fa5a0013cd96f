//! What was saved, by however many processes.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use tch::{Device, Tensor};

use super::error::{CheckpointError, Result, damaged, differs, torch};
use super::file::Reader;
use super::meta::{Meta, OptimizerMeta, Shape, StateMeta, rank_file};
use super::save::{GENERATOR, ID, OWN_STATES, of_optimizer, of_variable};
use crate::dist::Operation;
use crate::ffi;
use crate::optim::{Optimizer, ParamState};
use crate::sharded::Sharded;
use crate::sharded::param::{Param, cut};

/// What a checkpoint said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loaded {
    /// The count that it was saved with.
    pub step: u64,
    /// How many processes have saved it.
    pub world: usize,
    /// Whether each process has the CPU's generator of random numbers back that the one of its rank had: where there are as many processes.
    /// Else generators are as they were; seed them.
    pub generators: bool,
}

/// A checkpoint whose files are being read.
struct Source {
    folder: PathBuf,
    meta: Meta,
    readers: HashMap<usize, Reader>,
}

/// What the optimizer is to know of each parameter that it trains.
type States = Vec<(String, Option<ParamState>)>;

/// All that one rank takes from a checkpoint; nothing has been changed yet.
struct Found {
    pieces: Vec<Tensor>,
    whole: Vec<Tensor>,
    states: States,
    generator: Option<Tensor>,
}

impl Source {
    fn open(folder: &Path) -> Result<Self> {
        Ok(Self { folder: folder.to_owned(), meta: Meta::read(folder)?, readers: HashMap::new() })
    }

    fn reader(&mut self, rank: usize) -> Result<&mut Reader> {
        if !self.readers.contains_key(&rank) {
            let path = self.folder.join(rank_file(rank));
            let reader = Reader::open(&path)?;
            if reader.note(ID) != Some(&self.meta.id) {
                return Err(damaged(&path, "is of another save than the others"));
            }
            if reader.bytes != self.meta.bytes[rank] {
                return Err(damaged(
                    &path,
                    format!("has {} bytes, and was saved with {}", reader.bytes, self.meta.bytes[rank]),
                ));
            }
            self.readers.insert(rank, reader);
        }
        Ok(self.readers.get_mut(&rank).expect("it was opened"))
    }

    /// The elements `first .. first + own` of a tensor of `numel`, wherever they are.
    fn piece(&mut self, name: &str, param: &Param) -> Result<Tensor> {
        let end = param.first() + param.own;
        let mut parts = Vec::new();
        let number = |count: usize| i64::try_from(count).expect("processes are few");
        for rank in 0..self.meta.world {
            let (first, own) = cut(param.numel, number(rank), number(self.meta.world));
            let (from, to) = (first.max(param.first()), (first + own).min(end));
            if from < to {
                parts.push(self.reader(rank)?.read(name, from - first, to - from)?);
            }
        }
        if parts.is_empty() {
            // Its kind, which is that of any other piece of it.
            return self.reader(0)?.read(name, 0, 0);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(&parts, 0) })
    }

    /// The file of what each rank has for itself: that of this rank, or of the first where the ranks are others.
    fn own(&mut self, rank: usize, world: usize) -> Result<&mut Reader> {
        self.reader(if world == self.meta.world { rank } else { 0 })
    }

    /// What the optimizer knew of ignored variables.
    fn own_states(&mut self, rank: usize, world: usize) -> Result<BTreeMap<String, StateMeta>> {
        let path = self.folder.clone();
        let Some(text) = self.own(rank, world)?.note(OWN_STATES) else { return Ok(BTreeMap::new()) };
        serde_json::from_str(text).map_err(|error| damaged(&path, format!("has a note that cannot be read: {error}")))
    }

    /// A tensor that each rank has whole.
    fn whole(&mut self, name: &str, rank: usize, world: usize) -> Result<Tensor> {
        let reader = self.own(rank, world)?;
        let shape = reader.item(name)?.shape;
        Ok(reader.read(name, 0, shape.iter().product())?.view(&shape[..]))
    }
}

impl Sharded<'_> {
    /// Reads what [`save_sharded`](Self::save_sharded) has written, with however many processes; `optimizer`, of the same algorithm, goes
    /// on where the saved one was, its learning rates included, and without one its part is left aside. Buffers and ignored
    /// variables are each rank's own, or those of rank 0 where there were more or fewer ranks. Gradients stay as they are.
    /// Collective.
    ///
    /// With as many processes training goes on to the same bits as if it had not stopped.
    ///
    /// # Errors
    /// See [`CheckpointError`]: of any rank, on all ranks, before anything is changed.
    #[expect(clippy::missing_panics_doc, reason = "where nothing was found `all_done` is an error")]
    pub fn load_sharded(&mut self, path: impl AsRef<Path>, optimizer: Option<&mut Optimizer>) -> Result<Loaded> {
        let source = self.check_closed().and_then(|()| Source::open(path.as_ref()));
        let source = source.and_then(|source| self.check_fits(&source, optimizer.as_deref()).map(|()| source));
        let (mut source, own) = match source {
            Ok(source) => {
                let id = u64::from_str_radix(&source.meta.id, 16).unwrap_or_default();
                (Some(source), Ok([id, u64::from(optimizer.is_some())]))
            }
            Err(error) => (None, Err(error)),
        };
        let words = self.all_done(Operation::Load, own)?;
        for (i, what) in ["checkpoint", "optimizer to load"].into_iter().enumerate() {
            if let Some(rank) = words.iter().position(|of_rank| of_rank[i] != words[0][i]) {
                return Err(CheckpointError::Ranks { rank, what });
            }
        }
        let source = source.as_mut().expect("else it is an error of all ranks");
        let (found, own) = match self.find(source, optimizer.as_deref()) {
            Ok(found) => (Some(found), Ok([])),
            Err(error) => (None, Err(error)),
        };
        self.all_done(Operation::Load, own)?;
        let found = found.expect("else it is an error of all ranks");
        let generators = found.generator.is_some();
        self.take_states(&found.states, optimizer, source.meta.optimizer.as_ref())?;
        let taken = self.take(&found);
        self.all_done(Operation::Load, taken.map(|()| []))?;
        Ok(Loaded { step: source.meta.step, world: source.meta.world, generators })
    }

    /// Whether the checkpoint is of this model, and of this optimizer.
    fn check_fits(&self, source: &Source, optimizer: Option<&Optimizer>) -> Result<()> {
        let (folder, meta) = (&source.folder, &source.meta);
        let (parameters, others) = self.shapes();
        same_ties(folder, &self.ties(), &meta.ties)?;
        same(folder, "parameter", &parameters, &meta.parameters)?;
        same(folder, "variable", &others, &meta.others)?;
        let Some(optimizer) = optimizer else { return Ok(()) };
        self.check_own(optimizer)?;
        let Some(saved) = &meta.optimizer else {
            return Err(differs(folder, "it was saved without an optimizer"));
        };
        if saved.algorithm != optimizer.algorithm_name() {
            let (theirs, ours) = (&saved.algorithm, optimizer.algorithm_name());
            return Err(differs(folder, format!("it was saved with {theirs}, and the optimizer is {ours}")));
        }
        let groups = (saved.learning_rates.len(), optimizer.lrs().len());
        if groups.0 != groups.1 {
            let difference = format!("its optimizer has {} groups of parameters, and this one {}", groups.0, groups.1);
            return Err(differs(folder, difference));
        }
        let known: Vec<_> = optimizer.names().collect();
        match saved.states.keys().find(|name| !known.contains(&name.as_str())) {
            Some(name) => Err(differs(folder, format!("its optimizer trains `{name}`, and this one does not"))),
            None => Ok(()),
        }
    }

    fn find(&self, source: &mut Source, optimizer: Option<&Optimizer>) -> Result<Found> {
        let (rank, world) = (self.dist.rank(), self.dist.world());
        let pieces = self.params.iter().map(|param| source.piece(&of_variable(&param.name), param));
        let pieces: Vec<_> = pieces.collect::<Result<_>>()?;
        let whole = self.whole.iter().map(|(name, _)| source.whole(&of_variable(name), rank, world));
        let whole: Vec<_> = whole.collect::<Result<_>>()?;
        let (mut states, own) = (Vec::new(), source.own_states(rank, world)?);
        for (optimizer, name) in
            optimizer.iter().flat_map(|optimizer| optimizer.names().map(move |name| (optimizer, name)))
        {
            let saved = source.meta.optimizer.as_ref().and_then(|saved| saved.states.get(name)).cloned();
            let saved = saved.or_else(|| own.get(name).cloned());
            let state = saved.map(|saved| self.find_state(source, optimizer, name, &saved)).transpose()?;
            states.push((name.to_owned(), state));
        }
        for (param, piece) in self.params.iter().zip(&pieces) {
            check_like(&source.folder, &param.name, piece, &param.own_piece())?;
        }
        for ((name, variable), found) in self.whole.iter().zip(&whole) {
            check_like(&source.folder, name, found, variable)?;
        }
        let generator = (source.meta.world == world).then(|| source.whole(GENERATOR, rank, world)).transpose()?;
        if let Some(found) = &generator {
            let now = ffi::generator_bytes(Device::Cpu).map_err(torch("read the random number generator"))?;
            check_like(&source.folder, GENERATOR, found, &now)?;
        }
        Ok(Found { pieces, whole, states, generator })
    }

    fn find_state(
        &self,
        source: &mut Source,
        optimizer: &Optimizer,
        name: &str,
        saved: &StateMeta,
    ) -> Result<ParamState> {
        let param = self.param(name);
        let mut tensors = Vec::new();
        for what in &saved.tensors {
            let in_file = of_optimizer(what, name);
            let tensor = match param {
                Some(param) => source.piece(&in_file, param)?,
                None => source.whole(&in_file, self.dist.rank(), self.dist.world())?,
            };
            let known = optimizer.state_names().iter().find(|known| *known == what);
            let known = known
                .ok_or_else(|| differs(&source.folder, format!("{} has no `{what}`", optimizer.algorithm_name())))?;
            tensors.push((*known, tensor));
        }
        Ok(ParamState { step: saved.step, tensors })
    }

    /// The optimizer may have other options and refuse a state: then it is as before, on all ranks.
    fn take_states(
        &self,
        states: &States,
        optimizer: Option<&mut Optimizer>,
        saved: Option<&OptimizerMeta>,
    ) -> Result<()> {
        let Some((optimizer, saved)) = optimizer.zip(saved) else { return Ok(()) };
        let refused = torch("set the optimizer's state");
        let set = |optimizer: &mut Optimizer, states: &States, rates: &[f64]| {
            states.iter().try_for_each(|(name, state)| optimizer.set_state(name, state.as_ref()))?;
            optimizer.set_lrs(rates)
        };
        let state = |(name, _): &(String, _)| Ok((name.clone(), optimizer.state(name)?));
        let before = states.iter().map(state).collect::<std::result::Result<States, _>>();
        let rates = optimizer.lrs();
        let (taken, before) = match before {
            Ok(before) => (set(optimizer, states, &saved.learning_rates), before),
            Err(error) => (Err(error), States::new()),
        };
        let done = self.all_done(Operation::Load, taken.map(|()| []).map_err(&refused));
        if done.is_err() {
            // These it had.
            let _ = set(optimizer, &before, &rates);
        }
        done.map(drop)
    }

    fn take(&self, found: &Found) -> Result<()> {
        let copy = torch("copy into a variable");
        let _guard = tch::no_grad_guard();
        for (param, piece) in self.params.iter().zip(&found.pieces) {
            param.own_piece().f_copy_(piece).map_err(&copy)?;
        }
        for ((_, variable), value) in self.whole.iter().zip(&found.whole) {
            variable.shallow_clone().f_copy_(value).map_err(&copy)?;
        }
        if let Some(generator) = &found.generator {
            ffi::set_generator_bytes(Device::Cpu, generator).map_err(torch("set the random number generator"))?;
        }
        Ok(())
    }
}

fn same_ties(folder: &Path, ours: &BTreeMap<String, String>, theirs: &BTreeMap<String, String>) -> Result<()> {
    let only = |of: &BTreeMap<String, String>, and_not: &BTreeMap<String, String>| {
        of.iter()
            .find(|(name, first)| and_not.get(*name) != Some(first))
            .map(|(name, first)| (name.clone(), first.clone()))
    };
    if let Some((name, first)) = only(theirs, ours) {
        let difference = format!("its `{name}` is another name of `{first}`, and the model's is not");
        return Err(differs(folder, difference));
    }
    match only(ours, theirs) {
        Some((name, first)) => {
            Err(differs(folder, format!("the model's `{name}` is another name of `{first}`, and its own is not")))
        }
        None => Ok(()),
    }
}

fn same(folder: &Path, what: &str, ours: &BTreeMap<String, Shape>, theirs: &BTreeMap<String, Shape>) -> Result<()> {
    for (name, own) in ours {
        let Some(saved) = theirs.get(name) else {
            return Err(differs(folder, format!("it has no {what} `{name}`")));
        };
        if own != saved {
            let text = |shape: &Shape| format!("{} {:?}", shape.kind, shape.shape);
            return Err(differs(
                folder,
                format!("its {what} `{name}` is {}, and the model's {}", text(saved), text(own)),
            ));
        }
    }
    match theirs.keys().find(|name| !ours.contains_key(*name)) {
        Some(name) => Err(differs(folder, format!("it has a {what} `{name}`, and the model has not"))),
        None => Ok(()),
    }
}

/// Whether the file of a rank has what `meta.json` says.
fn check_like(folder: &Path, name: &str, found: &Tensor, expected: &Tensor) -> Result<()> {
    let text = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
    if text(found) == text(expected) {
        return Ok(());
    }
    Err(damaged(folder, format!("has a `{name}` of {}, where {} is expected", text(found), text(expected))))
}
