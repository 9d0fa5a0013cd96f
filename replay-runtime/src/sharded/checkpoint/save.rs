//! A checkpoint of each process's pieces.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tch::{Device, Tensor};

use super::error::{CheckpointError, Result, io, torch};
use super::file::{Item, Writer, sort, sync_folder};
use super::meta::{META, Meta, OptimizerMeta, Shape, StateMeta, rank_file};
use crate::dist::Operation;
use crate::ffi;
use crate::optim::Optimizer;
use crate::sharded::Sharded;

/// A place that is taken when all is there.
struct Place {
    path: PathBuf,
    /// Beside it, until then.
    work: PathBuf,
}

impl Place {
    fn new(path: &Path) -> Result<Self> {
        let Some(name) = path.file_name() else {
            let source = std::io::Error::other("it names no folder");
            return Err(CheckpointError::Io { action: "save to", path: path.to_owned(), source });
        };
        let mut work = OsString::from(name);
        work.push(".tmp");
        Ok(Self { path: path.to_owned(), work: path.with_file_name(work) })
    }

    /// What an earlier save has left half done is of no use to anybody.
    fn prepare(&self) -> Result<()> {
        if self.path.symlink_metadata().is_ok() {
            return Err(CheckpointError::Exists { path: self.path.clone() });
        }
        self.discard();
        // Folders that are new must be in theirs, on the disk.
        let new: Vec<_> = self
            .path
            .ancestors()
            .skip(1)
            .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
            .collect();
        fs::create_dir_all(&self.work).map_err(io("create", &self.work))?;
        new.iter().try_for_each(|folder| sync_folder(folder.parent().unwrap_or(Path::new(""))))
    }

    fn discard(&self) {
        let _ = fs::remove_dir_all(&self.work);
    }

    fn publish(&self, meta: &Meta) -> Result<()> {
        let path = self.work.join(META);
        let text = serde_json::to_vec_pretty(meta).map_err(|error| io("write", &path)(error.into()))?;
        let write = || {
            fs::write(&path, text)?;
            fs::File::open(&path)?.sync_all()
        };
        write().map_err(io("write", &path))?;
        sync_folder(&self.work)?;
        fs::rename(&self.work, &self.path).map_err(io("create", &self.path))?;
        sync_folder(self.path.parent().unwrap_or(Path::new(""))).inspect_err(|_| {
            // It is not known to last, so it is none.
            let _ = fs::rename(&self.path, &self.work);
        })
    }
}

/// What an optimizer knows beside tensors.
struct Known {
    /// On all ranks alike.
    shared: OptimizerMeta,
    /// Of ignored variables.
    own: BTreeMap<String, StateMeta>,
}

/// A tensor and what it will be called.
struct Content {
    item: Item,
    tensor: Tensor,
}

impl Content {
    fn new(name: String, tensor: Tensor) -> Self {
        Self { item: Item::of(name, &tensor), tensor }
    }
}

impl Sharded<'_> {
    /// Writes a checkpoint into the new folder `path`, which all ranks must see: each rank its pieces, its buffers and ignored variables,
    /// what `optimizer` knows of them, and the state of its generator of random numbers. `step` is the caller's own count. Gradients are
    /// not saved: save between `step` and the next `backward`. Collective.
    ///
    /// The folder appears when all of it is on the disk: a save that is interrupted, by whatever, leaves no checkpoint, only a
    /// folder `path` + `.tmp` that the next one of that name removes.
    ///
    /// # Errors
    /// See [`CheckpointError`]: of any rank, on all ranks. Then there is no checkpoint, and training can go on.
    pub fn save_sharded(&self, path: impl AsRef<Path>, optimizer: Option<&Optimizer>, step: u64) -> Result<()> {
        let first = self.dist.rank() == 0;
        let prepare = || {
            let place = Place::new(path.as_ref())?;
            self.check_closed()?;
            optimizer.map_or(Ok(()), |optimizer| self.check_own(optimizer))?;
            let known = optimizer.map(|optimizer| self.known_by(optimizer)).transpose()?;
            if first {
                place.prepare()?;
            }
            Ok((place, known))
        };
        let (prepared, own) = match prepare() {
            Ok((place, known)) => {
                let shared = known.as_ref().map(|known| &known.shared);
                let words = [hash(&format!("{shared:?}")), step, new_id()];
                (Some((place, known)), Ok(words))
            }
            Err(error) => (None, Err(error)),
        };
        let words = self.all_done(Operation::Save, own);
        // Without, it is an error already.
        let Some((place, known)) = prepared else { return words.map(drop) };
        let outcome = words.and_then(|words| self.save_to(&place, known, optimizer, &words));
        if first && outcome.is_err() {
            place.discard();
        }
        outcome
    }

    fn save_to(
        &self,
        place: &Place,
        known: Option<Known>,
        optimizer: Option<&Optimizer>,
        words: &[[u64; 3]],
    ) -> Result<()> {
        for (what, i) in [("state of its optimizer", 0), ("step", 1)] {
            if let Some(rank) = words.iter().position(|of_rank| of_rank[i] != words[0][i]) {
                return Err(CheckpointError::Ranks { rank, what });
            }
        }
        let [_, step, id] = words[0];
        let id = format!("{id:016x}");
        let path = place.work.join(rank_file(self.dist.rank()));
        let written = self.contents(known.as_ref(), optimizer).and_then(|contents| {
            let own = known.as_ref().map(|known| &known.own);
            write(&path, contents, &notes(&id, own))
        });
        let bytes = self.all_done(Operation::Save, written.map(|bytes| [bytes]))?;
        let published = if self.dist.rank() == 0 {
            let mut meta = Meta::new(id, step, bytes.iter().map(|[bytes]| *bytes).collect());
            meta.optimizer = known.map(|known| known.shared);
            (meta.parameters, meta.others) = self.shapes();
            meta.ties = self.ties();
            place.publish(&meta)
        } else {
            Ok(())
        };
        self.all_done(Operation::Save, published.map(|()| [])).map(drop)
    }

    /// Of the variables in pieces, and of the others.
    pub(super) fn shapes(&self) -> (BTreeMap<String, Shape>, BTreeMap<String, Shape>) {
        let shape = |shape: &[i64], kind| Shape { shape: shape.to_vec(), kind: format!("{kind:?}") };
        let cut = self.params.iter().map(|param| (param.name.clone(), shape(&param.shape, param.kind)));
        let whole = self.whole.iter().map(|(name, tensor)| (name.clone(), shape(&tensor.size(), tensor.kind())));
        (cut.collect(), whole.collect())
    }

    /// Further names of parameters, and under which name they are saved.
    pub(super) fn ties(&self) -> BTreeMap<String, String> {
        self.aliases.iter().map(|(name, number)| (name.clone(), self.params[*number].name.clone())).collect()
    }

    fn known_by(&self, optimizer: &Optimizer) -> Result<Known> {
        let (mut shared, mut own) = (BTreeMap::new(), BTreeMap::new());
        for name in optimizer.names() {
            let state = optimizer.state(name).map_err(torch("read the optimizer's state"))?;
            if let Some(state) = state {
                let tensors = state.tensors.iter().map(|(what, _)| (*what).to_owned()).collect();
                let states = if self.param(name).is_some() { &mut shared } else { &mut own };
                states.insert(name.to_owned(), StateMeta { step: state.step, tensors });
            }
        }
        let algorithm = optimizer.algorithm_name().to_owned();
        Ok(Known { shared: OptimizerMeta { algorithm, learning_rates: optimizer.lrs(), states: shared }, own })
    }

    /// All that this rank's file will have.
    fn contents(&self, known: Option<&Known>, optimizer: Option<&Optimizer>) -> Result<Vec<Content>> {
        let pieces = self.params.iter().map(|param| Content::new(of_variable(&param.name), param.own_piece()));
        let whole = self.whole.iter().map(|(name, tensor)| Content::new(of_variable(name), tensor.shallow_clone()));
        let mut contents: Vec<_> = pieces.chain(whole).collect();
        for name in known.iter().flat_map(|known| known.shared.states.keys().chain(known.own.keys())) {
            let state = optimizer.map(|optimizer| optimizer.state(name)).transpose();
            let state = state.map_err(torch("read the optimizer's state"))?.flatten();
            for (what, tensor) in state.into_iter().flat_map(|state| state.tensors) {
                contents.push(Content::new(of_optimizer(what, name), tensor));
            }
        }
        let generator = ffi::generator_bytes(Device::Cpu).map_err(torch("read the random number generator"))?;
        contents.push(Content::new(GENERATOR.to_owned(), generator));
        Ok(contents)
    }
}

/// In the header of each file: of which save it is.
pub(super) const ID: &str = "checkpoint";
/// And what the optimizer knows of ignored variables.
pub(super) const OWN_STATES: &str = "optimizer";
/// The generator's state, in the file of its rank.
pub(super) const GENERATOR: &str = "generator/cpu";

pub(super) fn of_variable(name: &str) -> String {
    format!("variable/{name}")
}

pub(super) fn of_optimizer(what: &str, name: &str) -> String {
    format!("optimizer/{what}/{name}")
}

/// What the header of a rank's file says beside tensors.
fn notes(id: &str, own: Option<&BTreeMap<String, StateMeta>>) -> HashMap<String, String> {
    let own = own.and_then(|own| serde_json::to_string(own).ok()).map(|own| (OWN_STATES.to_owned(), own));
    own.into_iter().chain([(ID.to_owned(), id.to_owned())]).collect()
}

fn write(path: &Path, mut contents: Vec<Content>, notes: &HashMap<String, String>) -> Result<u64> {
    sort(&mut contents, |content| &content.item);
    let mut writer = Writer::create(path, contents.iter().map(|content| &content.item), notes)?;
    contents.iter().try_for_each(|content| writer.write(&content.tensor))?;
    writer.finish()
}

/// The same in all processes of one program.
fn hash(text: &str) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(text)
}

/// Of one save: its files must not be taken for those of another.
fn new_id() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    hash(&format!("{time:?} {}", std::process::id()))
}
