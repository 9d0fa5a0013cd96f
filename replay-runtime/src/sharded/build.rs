//! How a store is cut: which parameters belong to which unit, and that all processes have built the same.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use tch::{Device, Kind, Tensor, nn};

use super::error::ShardError;
use super::param::{Mixed, Param, Places};
use super::ties::{self, Owner};
use super::transfer::Transfers;
use super::{RESIDENT, Sharded, Unit};
use crate::dist::{Dist, DistError, Operation, WORDS};
use crate::ffi;
use crate::store::{self, Parameter, UnitKey};

/// Choices for a [`Sharded`] store.
#[must_use = "a builder does nothing until `build` is called"]
pub struct ShardedBuilder<'d, 'b> {
    dist: &'d Dist,
    vs: &'b nn::VarStore,
    units: Vec<(String, UnitKey)>,
    ignored: Vec<String>,
    sync: bool,
    overlap: bool,
    mixed: Option<Mixed>,
    compute: Device,
}

impl<'d, 'b> ShardedBuilder<'d, 'b> {
    pub(super) fn new(dist: &'d Dist, vs: &'b nn::VarStore) -> Self {
        Self {
            dist,
            vs,
            units: Vec::new(),
            ignored: Vec::new(),
            sync: true,
            overlap: false,
            mixed: None,
            compute: Device::Cpu,
        }
    }

    /// The parameters whose names begin with `prefix.` are whole only while a block of `block` runs: one that is a method of
    /// that very object, marked [`replay_block`](crate::replay_block), or a closure that is given it by
    /// [`BlockOptions::unit`](crate::BlockOptions::unit). What belongs to no unit is whole while a rollout lives.
    ///
    /// The object must stay where it is: register it where it will be when its blocks run.
    pub fn unit<T: ?Sized>(mut self, prefix: &str, block: &T) -> Self {
        self.units.push((prefix.to_owned(), UnitKey::of(block)));
        self
    }

    /// The variable of that name, and those whose names begin with `prefix.`, stay whole on all processes; what becomes of
    /// their gradients is the caller's concern.
    pub fn ignore(mut self, prefix: &str) -> Self {
        self.ignored.push(prefix.to_owned());
        self
    }

    /// Whether all processes take over rank 0's values, of buffers too. Default: yes.
    pub fn sync_from_rank0(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// Whether, in the backward pass, the parameters of the unit before are on their way while a block is replayed and differentiated,
    /// and the gradients of the one after. It takes the memory of one more unit's parameters and gradients, and pays
    /// where there is a processor or a network to spare. Default: no.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Mixed precision: a unit's parameters are sent, and are whole, in the kind `param`, in which its blocks compute; gradients are sent
    /// in the kind `reduce`, and added up in f32 (f64 for f64). Pieces, and what the optimizer does to them, keep their own kind.
    /// Inputs and buffers are the caller's concern. Default: all in the parameter's own kind.
    pub fn mixed(mut self, param: Kind, reduce: Kind) -> Self {
        self.mixed = Some(Mixed { param, reduce });
        self
    }

    /// Blocks compute on a CUDA device: a unit's parameters go there while they are whole, buffers and ignored variables for good, and
    /// inputs are the caller's concern. Pieces, gradients of pieces and what the optimizer knows stay on the CPU, where the store
    /// must have been made. Parameters and gradients are sent by Gloo from host to host, or by NCCL where the group has it (feature
    /// `nccl`). Not yet run on a GPU. Default: the CPU.
    pub fn compute_on(mut self, device: Device) -> Self {
        self.compute = device;
        self
    }

    /// Compares what all processes have built, and cuts the parameters. Collective.
    ///
    /// # Errors
    /// See [`ShardError`]; then nothing has been cut, and the group has failed.
    pub fn build(self) -> Result<Sharded<'d>, ShardError> {
        let dist = self.dist;
        self.cut().inspect_err(|error| {
            // What ranks find out together, all of them know.
            if !matches!(error, ShardError::Dist(_)) {
                dist.abort(&error.to_string());
            }
        })
    }

    fn cut(self) -> Result<Sharded<'d>, ShardError> {
        let mut named: Vec<_> = self.vs.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let groups = store::groups(self.vs);
        self.check_prefixes(&named)?;
        self.check_mixed()?;
        self.check_device()?;
        ties::check(&named, self.compute.is_cuda(), |name, tensor| {
            self.owner(name, groups.contains_key(&ffi::identity(tensor)))
        })?;
        let mut numbers = HashMap::new();
        let (mut cut, mut aliases, mut whole, mut ignored) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (name, tensor) in named.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())) {
            let identity = ffi::identity(&tensor);
            let group = groups.get(&identity);
            if group.is_none() || self.is_ignored(&name) {
                if let Some(&group) = group {
                    ignored.push(Parameter { name: name.clone(), tensor: tensor.shallow_clone(), group });
                }
                whole.push((name, tensor));
            } else if let Some(&number) = numbers.get(&identity) {
                aliases.push((name, number));
            } else {
                check_parameter(&name, &tensor)?;
                numbers.insert(identity, cut.len());
                cut.push((name, tensor));
            }
        }
        let units = self.claim(&cut)?;
        self.agree(&cut, &aliases, &whole, &units, &groups)?;
        self.sync(cut.iter().chain(&whole).map(|(_, tensor)| tensor))?;
        self.dist.name_units(units.iter().map(|unit| unit.name.clone()).collect());
        let by_key = self.units.iter().enumerate().map(|(i, (_, key))| (*key, i + 1)).collect();
        let places = Places { compute: self.compute, payload: self.payload() };
        for (_, tensor) in &whole {
            move_to(tensor, self.compute);
        }
        let param = |(name, tensor)| {
            let group = groups[&ffi::identity(&tensor)];
            Param::new(name, tensor, group, self.mixed, places, self.dist)
        };
        let params = cut.into_iter().map(param).collect();
        Ok(Sharded {
            dist: self.dist,
            params,
            aliases,
            units,
            by_key,
            whole,
            ignored,
            transfers: Transfers::new(self.overlap),
            passing: Cell::new(false),
            written: RefCell::default(),
            peak: Cell::new(0),
            gathered: Cell::new(0),
        })
    }

    fn payload(&self) -> Device {
        if self.compute.is_cuda() { self.dist.payload() } else { Device::Cpu }
    }

    fn check_device(&self) -> Result<(), ShardError> {
        let there = match self.compute {
            Device::Cpu => true,
            Device::Cuda(index) => i64::try_from(index).is_ok_and(|index| index < tch::Cuda::device_count()),
            _ => false,
        };
        if there { Ok(()) } else { Err(ShardError::Device { device: self.compute }) }
    }

    fn check_mixed(&self) -> Result<(), ShardError> {
        let kinds = self.mixed.iter().flat_map(|mixed| [mixed.param, mixed.reduce]);
        let refused = kinds.into_iter().find(|kind| !matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16));
        refused.map_or(Ok(()), |kind| Err(ShardError::Mixed { kind }))
    }

    fn check_prefixes(&self, named: &[(String, Tensor)]) -> Result<(), ShardError> {
        let prefixes = self.units.iter().map(|(prefix, _)| prefix).chain(&self.ignored);
        for prefix in prefixes {
            if !named.iter().any(|(name, _)| is_under(name, prefix)) {
                let known = named.iter().take(8).map(|(name, _)| name.clone()).collect();
                return Err(ShardError::NoVariable { prefix: prefix.clone(), known });
            }
        }
        let mut keys = HashMap::new();
        for (prefix, key) in &self.units {
            if let Some(first) = keys.insert(key, prefix) {
                return Err(ShardError::SameObject { first: first.clone(), second: prefix.clone() });
            }
        }
        Ok(())
    }

    fn is_ignored(&self, name: &str) -> bool {
        self.ignored.iter().any(|prefix| is_under(name, prefix))
    }

    /// The one unit that a parameter of that name belongs to.
    fn unit_of(&self, name: &str) -> Result<Option<usize>, ShardError> {
        let mut owners = self.units.iter().enumerate().filter(|(_, (prefix, _))| is_under(name, prefix));
        match (owners.next(), owners.next()) {
            (Some((_, (first, _))), Some((_, (second, _)))) => {
                let (parameter, first, second) = (name.to_owned(), first.clone(), second.clone());
                Err(ShardError::Claimed { parameter, first, second })
            }
            (owner, _) => Ok(owner.map(|(at, _)| at)),
        }
    }

    fn owner(&self, name: &str, trainable: bool) -> Result<Owner<'_>, ShardError> {
        if !trainable {
            return Ok(Owner::Buffer);
        }
        if self.is_ignored(name) {
            return Ok(Owner::Ignored);
        }
        Ok(self.unit_of(name)?.map_or(Owner::Resident, |at| Owner::Unit(&self.units[at].0)))
    }

    /// Which parameters belong to which unit; the resident one is the first.
    fn claim(&self, params: &[(String, Tensor)]) -> Result<Vec<Unit>, ShardError> {
        let unit = |name: &str| Unit {
            name: name.to_owned(),
            params: Vec::new(),
            open: Cell::new(0),
            rooms: RefCell::default(),
            versions: RefCell::default(),
        };
        let mut units: Vec<_> =
            std::iter::once("resident").chain(self.units.iter().map(|(name, _)| name.as_str())).map(unit).collect();
        for (i, (name, _)) in params.iter().enumerate() {
            units[self.unit_of(name)?.map_or(RESIDENT, |at| at + 1)].params.push(i);
        }
        Ok(units)
    }

    /// Whether all processes have built the same: a hash of each part, so that the first that differs can be named.
    fn agree(
        &self,
        params: &[(String, Tensor)],
        aliases: &[(String, usize)],
        whole: &[(String, Tensor)],
        units: &[Unit],
        groups: &HashMap<usize, usize>,
    ) -> Result<(), DistError> {
        let variables = |list: &[(String, Tensor)]| {
            list.iter()
                .map(|(name, tensor)| {
                    let (kind, group) = (format!("{:?}", tensor.kind()), groups.get(&ffi::identity(tensor)));
                    (name.clone(), tensor.size(), kind, tensor.requires_grad(), group)
                })
                .collect::<Vec<_>>()
        };
        let units: Vec<_> = units.iter().map(|unit| (&unit.name, &unit.params)).collect();
        let (params, whole) = (variables(params), variables(whole));
        let version = (env!("CARGO_PKG_VERSION"), ffi::library_version().unwrap_or_default());
        let parts = [
            hash(&version),
            hash(&(params, aliases)),
            hash(&whole),
            hash(&units),
            hash(&(
                self.sync,
                self.overlap,
                self.compute.is_cuda(),
                self.payload().is_cuda(),
                format!("{:?}", self.mixed),
            )),
        ];
        let mut words = [0; WORDS];
        for (word, part) in words.chunks_exact_mut(8).zip(parts) {
            word.copy_from_slice(&part.to_le_bytes());
        }
        let records = self.dist.enter(Operation::Build, None, 0, words)?;
        let names = [
            "the library's or LibTorch's version",
            "the parameters",
            "the other variables",
            "the units",
            "`sync_from_rank0`, `overlap`, `compute_on` or `mixed`",
        ];
        for (rank, record) in records.iter().enumerate() {
            let differs = |(ours, theirs): (&[u8], &[u8])| ours != theirs;
            let at = records[0].words.chunks(8).zip(record.words.chunks(8)).position(differs);
            if let Some(at) = at {
                return Err(DistError::Build { rank, difference: format!("{} differ", names[at]) });
            }
        }
        Ok(())
    }

    fn sync<'t>(&self, tensors: impl Iterator<Item = &'t Tensor>) -> Result<(), DistError> {
        let Some(group) = self.dist.group().filter(|_| self.sync) else { return Ok(()) };
        self.dist.enter(Operation::Broadcast, None, 0, [0; WORDS])?;
        for tensor in tensors.filter(|tensor| tensor.numel() > 0) {
            tch::no_grad(|| {
                let flat = tensor.detach().contiguous();
                group.broadcast(&flat, 0).map_err(|error| self.dist.lost(Operation::Broadcast, None, error))?;
                tensor.shallow_clone().copy_(&flat);
                Ok::<_, DistError>(())
            })?;
        }
        Ok(())
    }
}

/// Whether a variable is the one of that name or below it; all are below the empty one.
fn is_under(name: &str, prefix: &str) -> bool {
    prefix.is_empty() || name == prefix || name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('.'))
}

/// What the model's layers hold is on that device.
fn move_to(tensor: &Tensor, device: Device) {
    if tensor.device() != device {
        tch::no_grad(|| tensor.shallow_clone().set_data(&tensor.to_device(device)));
    }
}

fn check_parameter(name: &str, tensor: &Tensor) -> Result<(), ShardError> {
    if ffi::storage(tensor).is_some() && !ffi::owns_storage(tensor) {
        return Err(ShardError::Held { parameter: name.to_owned() });
    }
    let what = match tensor.kind() {
        Kind::Float | Kind::Double | Kind::BFloat16 if tensor.device() == Device::Cpu => return Ok(()),
        Kind::Float | Kind::Double | Kind::BFloat16 => format!("on {:?}", tensor.device()),
        kind => format!("of kind {kind:?}"),
    };
    Err(ShardError::Parameter { parameter: name.to_owned(), what })
}

/// The same in all processes of one program.
fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_a_prefix() {
        for (name, prefix, under) in [
            ("layers.1.weight", "layers.1", true),
            ("layers.10.weight", "layers.1", false),
            ("layers.1", "layers.1", true),
            ("layers", "layers.1", false),
            ("head.weight", "", true),
        ] {
            assert_eq!(is_under(name, prefix), under, "{name} under {prefix}");
        }
    }
}
