//! Parameters, gradients and optimizer state cut over processes: each holds a piece of every parameter, and the whole of a unit
//! only while one of its blocks runs.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use tch::{Tensor, nn};

mod build;
mod checkpoint;
mod error;
mod memory;
mod norm;
mod param;
mod spare;
mod ties;
mod transfer;

pub use self::build::ShardedBuilder;
pub use self::checkpoint::{CheckpointError, Loaded};
pub use self::error::ShardError;
pub use self::memory::MemoryReport;
use self::param::Param;
use self::transfer::Transfers;
use crate::dist::{Dist, DistError};
use crate::ffi::{self, ShimError};
use crate::store::{Parameter, ParameterStore, Shards, Store, UnitKey};

/// Parameters that are whole while a block of theirs runs, or, of the resident unit, while a rollout lives.
struct Unit {
    name: String,
    params: Vec<usize>,
    /// How many windows are open.
    open: Cell<usize>,
    /// What the whole parameters are in meanwhile.
    rooms: RefCell<Vec<Tensor>>,
    /// Their versions when they became whole.
    versions: RefCell<Vec<u64>>,
}

/// A model's parameters over all processes of a [`Dist`].
///
/// The variables of the [`VarStore`](nn::VarStore) become this process's pieces, vectors: an optimizer of tch that is made
/// after [`build`](ShardedBuilder::build) trains them as they are, and its own state is as small. A rollout of this store brings the
/// parameters of a [unit](ShardedBuilder::unit) together before a block of it runs or is replayed, and lets go of them after;
/// its [`backward`](crate::Rollout::backward) leaves the mean of all processes' gradients in the pieces' `.grad`, and adds to what is
/// there. Variables that are not trainable, and what is [ignored](ShardedBuilder::ignore), stay whole everywhere.
///
/// All processes must do the same: the same blocks, in the same order. Where they do not, all of them get an error that says who
/// was about to do what.
///
/// ```no_run
/// # use replay_runtime::{Rollout, Sharded, dist::Dist, replay_block};
/// # use tch::{Device, Kind, Tensor, nn, nn::OptimizerConfig};
/// # struct Layer(nn::Linear);
/// # impl Layer {
/// #     #[replay_block]
/// #     fn forward(&self, x: &Tensor) -> Tensor { x.apply(&self.0).tanh() }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dist = Dist::from_env()?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layers: Vec<Layer> =
///     (0..8).map(|i| Layer(nn::linear(vs.root() / "layers" / i, 512, 512, Default::default()))).collect();
///
/// let mut sharded = Sharded::builder(&dist, &vs);
/// for (i, layer) in layers.iter().enumerate() {
///     sharded = sharded.unit(&format!("layers.{i}"), layer);
/// }
/// let sharded = sharded.build()?;
/// let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
///
/// let mut x = Tensor::randn([64, 512], (Kind::Float, Device::Cpu));
/// let rollout = Rollout::new(&sharded);
/// for layer in &layers {
///     x = layer.forward_replay(&rollout, &x)?;
/// }
/// rollout.backward(&x.square().mean(Kind::Float))?;
/// sharded.clip_grad_norm(1.0)?;
/// optimizer.step();
/// optimizer.zero_grad();
/// dist.shutdown()?;
/// # Ok(())
/// # }
/// ```
pub struct Sharded<'d> {
    dist: &'d Dist,
    params: Vec<Param>,
    /// Further names of parameters, each with the parameter's number.
    aliases: Vec<(String, usize)>,
    /// The first is the resident one.
    units: Vec<Unit>,
    by_key: HashMap<UnitKey, usize>,
    /// Variables that are whole everywhere.
    whole: Vec<(String, Tensor)>,
    /// Those of them that are trained.
    ignored: Vec<Parameter>,
    transfers: Transfers,
    /// A backward pass is under way.
    passing: Cell<bool>,
    /// A parameter that was written to while it was whole.
    written: RefCell<Option<String>>,
    /// The most bytes of gathered parameters at once.
    peak: Cell<u64>,
    gathered: Cell<u64>,
}

const RESIDENT: usize = 0;

impl<'d> Sharded<'d> {
    /// A sharded store of all that `vs` has; then no variable may be added to it.
    pub fn builder<'b>(dist: &'d Dist, vs: &'b nn::VarStore) -> ShardedBuilder<'d, 'b> {
        ShardedBuilder::new(dist, vs)
    }

    /// The processes.
    pub fn dist(&self) -> &'d Dist {
        self.dist
    }

    /// Undefines the gradients of all pieces. Their memory is used for the next ones, unless somebody holds them.
    pub fn zero_grad(&self) {
        for param in &self.params {
            // A field that is set to nothing cannot be refused.
            let _ = ffi::set_grad(&param.tensor, None);
        }
    }

    fn number(unit: usize) -> Option<u32> {
        u32::try_from(unit).ok()
    }

    fn versions_of(&self, unit: usize) -> Result<Vec<u64>, DistError> {
        self.params_of(unit).map(version).collect()
    }

    /// What was written to a whole parameter goes with it; in a world of one it is the piece.
    fn note_writes(&self, unit: usize) {
        let before = self.units[unit].versions.take();
        if self.dist.world() > 1
            && let Ok(now) = self.versions_of(unit)
            && let Some(at) = before.iter().zip(&now).position(|(before, now)| before != now)
        {
            let number = self.units[unit].params[at];
            self.written.borrow_mut().get_or_insert_with(|| self.params[number].name.clone());
        }
    }

    fn params_of(&self, unit: usize) -> impl Iterator<Item = &Param> {
        self.units[unit].params.iter().map(|&i| &self.params[i])
    }
}

impl Shards for Sharded<'_> {
    fn unit(&self, key: &UnitKey) -> Option<usize> {
        self.by_key.get(key).copied()
    }

    fn resident(&self) -> usize {
        RESIDENT
    }

    fn open(&self, unit: usize) -> Result<(), DistError> {
        let open = &self.units[unit].open;
        if let Some(parameter) = self.written.borrow().clone() {
            return Err(DistError::Written { parameter });
        }
        if open.get() == 0 {
            if let Some(param) = self.params_of(unit).find(|param| !param.is_own()) {
                return Err(DistError::Replaced { parameter: param.name.clone() });
            }
            let wholes = self.gather(unit)?;
            self.params_of(unit).zip(&wholes).for_each(|(param, whole)| param.become_whole(whole));
            self.units[unit].rooms.replace(wholes);
            self.units[unit].versions.replace(self.versions_of(unit)?);
            self.gathered.set(self.gathered.get() + self.params_of(unit).map(Param::bytes).sum::<u64>());
            self.peak.set(self.peak.get().max(self.gathered.get()));
        }
        open.set(open.get() + 1);
        Ok(())
    }

    fn close(&self, unit: usize) {
        let open = &self.units[unit].open;
        open.set(open.get().saturating_sub(1));
        if open.get() == 0 {
            self.note_writes(unit);
            self.params_of(unit).for_each(Param::shard);
            let rooms = self.units[unit].rooms.take();
            // In a world of one they are the pieces. The resident unit's time comes once in a rollout.
            if self.dist.world() > 1 && unit != RESIDENT {
                self.transfers.spare.give(rooms);
            }
            let bytes = self.params_of(unit).map(Param::bytes).sum::<u64>();
            self.gathered.set(self.gathered.get().saturating_sub(bytes));
        }
    }

    fn begin_pass(&self) -> bool {
        !self.passing.replace(true)
    }

    fn end_pass(&self) {
        self.passing.set(false);
    }

    fn take_grads(&self, unit: usize) -> Result<Vec<Option<Tensor>>, DistError> {
        let take = |param: &Param| ffi::take_grad(&param.tensor);
        self.params_of(unit).map(take).collect::<Result<_, _>>().map_err(torch("take the gradients"))
    }

    fn reduce(&self, unit: usize, grads: Vec<Option<Tensor>>) -> Result<(), DistError> {
        self.exchange(unit, grads)
    }

    fn prefetch(&self, unit: Option<usize>) -> Result<(), DistError> {
        self.begin_ahead(unit)
    }

    fn flush(&self) -> Result<(), DistError> {
        self.settle_exchange()?;
        // Parameters that were expected in vain will have other values in the next rollout.
        self.transfers.forget();
        self.params.iter().try_for_each(Param::flush).map_err(torch("set the gradients"))
    }

    fn forget(&self) {
        self.transfers.forget();
        self.params.iter().for_each(Param::forget);
    }

    fn versions(&self) -> Result<Vec<u64>, DistError> {
        self.params.iter().map(version).collect()
    }

    fn changed(&self, before: &[u64]) -> Result<Option<String>, DistError> {
        let now = self.versions()?;
        let at = before.iter().zip(&now).position(|(before, now)| before != now);
        Ok(at.map(|i| self.params[i].name.clone()))
    }

    fn abort(&self, why: &str) {
        self.dist.abort(why);
    }

    fn is_whole(&self, identity: usize) -> Result<bool, DistError> {
        let owned = |unit: &&Unit| unit.params.iter().any(|&i| ffi::identity(&self.params[i].tensor) == identity);
        let Some(unit) = self.units.iter().find(owned) else { return Ok(false) };
        if unit.open.get() > 0 {
            return Ok(true);
        }
        let parameter = unit.params.iter().find(|&&i| ffi::identity(&self.params[i].tensor) == identity);
        let parameter = parameter.map_or_else(String::new, |&i| self.params[i].name.clone());
        Err(DistError::Piece { parameter, unit: unit.name.clone() })
    }
}

fn version(param: &Param) -> Result<u64, DistError> {
    Ok(ffi::fingerprint(&param.tensor).map_err(torch("read the parameters"))?.version)
}

/// A failure of LibTorch's on this process alone.
fn torch(action: &'static str) -> impl Fn(ShimError) -> DistError {
    move |error| DistError::Torch { action, source: Box::new(error.into()) }
}

impl ParameterStore for Sharded<'_> {}

impl Store for Sharded<'_> {
    /// What does not come and go: the resident unit while a rollout lives, and what is whole everywhere.
    fn named(&self) -> Vec<(String, Tensor)> {
        let resident = self.params_of(RESIDENT).map(|param| (param.name.clone(), param.tensor.shallow_clone()));
        resident.chain(self.whole.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))).collect()
    }

    fn trainable(&self) -> Vec<Tensor> {
        let params = self.params.iter().map(|param| param.tensor.shallow_clone());
        params.chain(self.ignored.iter().map(|ignored| ignored.tensor.shallow_clone())).collect()
    }

    fn parameters(&self) -> Vec<Parameter> {
        let parameter = |name: &str, tensor: &Tensor, group| Parameter {
            name: name.to_owned(),
            tensor: tensor.shallow_clone(),
            group,
        };
        let cut = self.params.iter().map(|param| parameter(&param.name, &param.tensor, param.group));
        let ignored = self.ignored.iter().map(|ignored| parameter(&ignored.name, &ignored.tensor, ignored.group));
        cut.chain(ignored).collect()
    }

    fn count(&self) -> usize {
        self.params.len() + self.whole.len()
    }

    fn shards(&self) -> Option<&dyn Shards> {
        Some(self)
    }
}

impl std::fmt::Debug for Sharded<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units: Vec<_> = self.units.iter().map(|unit| (&unit.name, unit.params.len())).collect();
        f.debug_struct("Sharded").field("dist", self.dist).field("units", &units).finish_non_exhaustive()
    }
}
