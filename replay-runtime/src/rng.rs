//! The generators of random numbers around a block: where its forward found them, and where its replay must.
//!
//! LibTorch has one CPU generator for all threads. While one thread alone has rollouts, their states before and after
//! a forward tell what it drew, and the lock that it holds meanwhile costs nothing. As soon as a second thread has one,
//! states say nothing about who drew; then a callback before each operation notes the state and takes the lock when
//! the block draws for the first time, and blocks that draw nothing run side by side.

use std::cell::RefCell;

use tch::{Device, Tensor};

use crate::error::{InBlock, ReplayError};
use crate::ffi::{self, DrawLock, DrawWatch, ShimError};

/// How a rollout treats random numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RngPolicy {
    /// Replays draw what forwards drew. Otherwise blocks must not draw.
    pub(crate) preserve: bool,
    /// While several threads have rollouts, their blocks draw one after the other.
    pub(crate) serialize: bool,
}

impl RngPolicy {
    /// Whether draws of this thread must not come between those of others.
    pub(crate) fn orders_draws(self) -> bool {
        self.serialize || !self.preserve
    }

    /// Only the callback can tell who draws.
    fn watches(self) -> bool {
        self.orders_draws() && ffi::several_threads()
    }

    fn lock(self) -> Option<DrawLock> {
        self.serialize.then(DrawLock::hold)
    }
}

/// What a forward drew.
pub(crate) struct RngRecord {
    generators: Vec<Generator>,
    policy: RngPolicy,
    /// The only proof that a replay drew the same are its outputs.
    pub(crate) unproven: bool,
}

struct Generator {
    device: Device,
    /// The state before the forward. `None` where it is known that the forward drew nothing; that the state after it is
    /// the same does not say so, since a body may draw and seed.
    before: Option<Tensor>,
    /// The hashes of the states before it and after it.
    hashes: [u64; 2],
}

impl RngRecord {
    /// Whether a replay needs the generators where the forward found them.
    fn is_set(&self) -> bool {
        self.generators.iter().any(|generator| generator.before.is_some())
    }

    fn moved(&self) -> bool {
        self.generators.iter().any(|generator| generator.hashes[0] != generator.hashes[1])
    }
}

/// The last states that blocks found: those that draw nothing share one.
#[derive(Default)]
pub(crate) struct RngStates(RefCell<Vec<(Device, u64, Tensor)>>);

impl RngStates {
    fn share(&self, device: Device, hash: u64, state: Tensor) -> Tensor {
        let mut known = self.0.borrow_mut();
        if let Some((_, _, same)) = known.iter().find(|(of, found, _)| *of == device && *found == hash) {
            return same.shallow_clone();
        }
        known.retain(|(of, _, _)| *of != device);
        known.push((device, hash, state.shallow_clone()));
        state
    }
}

/// How a forward finds out what it draws.
enum Source {
    States(Vec<Tensor>, #[expect(dead_code, reason = "held until it is dropped")] Option<DrawLock>),
    Watch(DrawWatch),
}

/// The generators during a forward. Dropped, which is what happens when the forward fails, it puts them back.
pub(crate) struct ForwardRng {
    policy: RngPolicy,
    devices: Vec<Device>,
    source: Source,
    /// Numbers drawn by others may stand between its own.
    disturbed: bool,
    succeeded: bool,
}

impl ForwardRng {
    pub(crate) fn begin(policy: RngPolicy, cuda: Option<Device>) -> Result<Self, ShimError> {
        let devices: Vec<_> = [Some(Device::Cpu), cuda].into_iter().flatten().collect();
        let source = if policy.watches() {
            Source::Watch(DrawWatch::begin(cuda)?)
        } else {
            let lock = policy.lock();
            Source::States(devices.iter().map(|&device| ffi::rng_get(device)).collect::<Result<_, _>>()?, lock)
        };
        let disturbed = !matches!(source, Source::Watch(_)) && !policy.serialize && ffi::several_threads();
        Ok(Self { policy, devices, source, disturbed, succeeded: false })
    }

    /// The state before the first draw; `None` if the callback saw none.
    fn before(&self, i: usize) -> Result<Option<Tensor>, ShimError> {
        match &self.source {
            Source::States(states, _) => Ok(Some(states[i].shallow_clone())),
            Source::Watch(watch) => watch.before(self.devices[i]),
        }
    }

    fn generator(&self, i: usize, states: &RngStates) -> Result<Generator, ShimError> {
        let device = self.devices[i];
        let Some(before) = self.before(i)? else { return Ok(Generator { device, before: None, hashes: [0; 2] }) };
        let hashes = [ffi::bytes_hash(&before)?, ffi::bytes_hash(&ffi::rng_get(device)?)?];
        Ok(Generator { device, before: Some(states.share(device, hashes[0], before)), hashes })
    }

    /// The call has succeeded: the generators stay where they are.
    pub(crate) fn succeeded(mut self) {
        self.succeeded = true;
    }

    /// The body has run: what a replay needs of the generators.
    pub(crate) fn record(&self, block: &str, states: &RngStates) -> Result<RngRecord, ReplayError> {
        let generators = (0..self.devices.len()).map(|i| self.generator(i, states)).collect::<Result<_, _>>();
        let generators = generators.in_block(block, "read the random number generator")?;
        let record = RngRecord { generators, policy: self.policy, unproven: self.disturbed };
        if !self.policy.preserve && record.moved() {
            return Err(ReplayError::RandomWithoutState { block: block.to_owned() });
        }
        Ok(record)
    }
}

impl Drop for ForwardRng {
    fn drop(&mut self) {
        if self.succeeded {
            return;
        }
        for (i, &device) in self.devices.iter().enumerate() {
            if let Ok(Some(state)) = self.before(i) {
                let _ = ffi::rng_set(device, &state);
            }
        }
    }
}

/// The generators during a replay. Dropped, it puts them back to where it found them, and then gives the lock back.
pub(crate) struct ReplayRng {
    set: Vec<SetGenerator>,
    /// Where the forward drew nothing, and the replay must not.
    watched: Option<(DrawWatch, Vec<Device>)>,
    _lock: Option<DrawLock>,
}

struct SetGenerator {
    device: Device,
    caller: Tensor,
    /// The hash of the state in which the replay must leave it. `None`: others draw meanwhile, and any will do.
    expected: Option<u64>,
}

impl ReplayRng {
    pub(crate) fn begin(record: &RngRecord) -> Result<Self, ShimError> {
        let policy = record.policy;
        if !record.is_set() && policy.watches() {
            let devices: Vec<_> = record.generators.iter().map(|generator| generator.device).collect();
            let watch = DrawWatch::begin(devices.iter().copied().find(|device| device.is_cuda()))?;
            return Ok(Self { set: Vec::new(), watched: Some((watch, devices)), _lock: None });
        }
        let lock = policy.lock();
        let set = record.generators.iter().map(|generator| SetGenerator::enter(generator, record.unproven));
        Ok(Self { set: set.collect::<Result<_, _>>()?, watched: None, _lock: lock })
    }

    /// An error if the replay did not leave the generators where the forward did.
    pub(crate) fn check(&self, block: &str) -> Result<(), ReplayError> {
        match self.diverged().in_block(block, "read the random number generator")? {
            Some(device) => Err(ReplayError::RngDiverged { block: block.to_owned(), device: format!("{device:?}") }),
            None => Ok(()),
        }
    }

    /// [`check`](Self::check) after a replay that was ended early: `agree` says whether the generators stand where the forward's
    /// stood at that place.
    pub(crate) fn check_stopped(&self, block: &str, agree: bool) -> Result<(), ReplayError> {
        if self.set.is_empty() {
            return self.check(block);
        }
        let device = || self.set.last().map_or(Device::Cpu, |generator| generator.device);
        if agree {
            Ok(())
        } else {
            Err(ReplayError::RngDiverged { block: block.to_owned(), device: format!("{:?}", device()) })
        }
    }

    /// The device of the first generator that is not where it should be.
    fn diverged(&self) -> Result<Option<Device>, ShimError> {
        if let Some((watch, devices)) = &self.watched {
            for &device in devices {
                if moved(watch, device)? {
                    return Ok(Some(device));
                }
            }
        }
        for generator in &self.set {
            if !generator.stands()? {
                return Ok(Some(generator.device));
            }
        }
        Ok(None)
    }
}

impl Drop for ReplayRng {
    fn drop(&mut self) {
        // Wherever they are now: a body that failed may have drawn or seeded although its forward did not.
        for generator in self.set.drain(..) {
            let _ = ffi::rng_set(generator.device, &generator.caller);
        }
        if let Some((watch, devices)) = &self.watched {
            put_back(watch, devices);
        }
    }
}

/// Whether the device's generator is elsewhere than before the first operation that may draw: dropout in eval mode is
/// one, and draws nothing.
fn moved(watch: &DrawWatch, device: Device) -> Result<bool, ShimError> {
    let Some(before) = watch.before(device)? else { return Ok(false) };
    Ok(ffi::bytes_hash(&before)? != ffi::bytes_hash(&ffi::rng_get(device)?)?)
}

/// After a replay that drew although its forward did not.
fn put_back(watch: &DrawWatch, devices: &[Device]) {
    for &device in devices {
        if let Ok(Some(state)) = watch.before(device) {
            let _ = ffi::rng_set(device, &state);
        }
    }
}

impl SetGenerator {
    fn enter(generator: &Generator, unproven: bool) -> Result<Self, ShimError> {
        let device = generator.device;
        let caller = ffi::rng_get(device)?;
        let expected = match &generator.before {
            Some(state) => {
                ffi::rng_set(device, state)?;
                generator.hashes[1]
            }
            None => ffi::bytes_hash(&caller)?,
        };
        Ok(Self { device, caller, expected: (!unproven).then_some(expected) })
    }

    /// Whether it is where it should be.
    fn stands(&self) -> Result<bool, ShimError> {
        let Some(expected) = self.expected else { return Ok(true) };
        Ok(ffi::bytes_hash(&ffi::rng_get(self.device)?)? == expected)
    }
}
