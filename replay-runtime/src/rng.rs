//! The generators of random numbers around a block: where its forward found them, and where its replay must.
//!
//! LibTorch has one CPU generator for all threads. While one thread alone has rollouts, their states before and after
//! a forward tell what it drew, and the lock that it holds meanwhile costs nothing. As soon as a second thread has one,
//! states say nothing about who drew; then a callback before each operation notes the state and takes the lock when
//! the block draws for the first time, and blocks that draw nothing run side by side.

use std::cell::RefCell;
use std::rc::Rc;

use tch::Device;

use crate::error::{InBlock, ReplayError};
use crate::ffi::{self, DrawLock, DrawWatch, GeneratorState, ShimError};

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
    /// The states before and after the forward, one object where they are equal. `None` where it is known that the
    /// forward drew nothing; equal states do not say so, since a body may draw and seed.
    states: Option<[Rc<GeneratorState>; 2]>,
}

impl RngRecord {
    /// Whether a replay needs the generators where the forward found them.
    fn is_set(&self) -> bool {
        self.generators.iter().any(|generator| generator.states.is_some())
    }

    fn moved(&self) -> bool {
        let moved = |[before, after]: &[Rc<_>; 2]| !Rc::ptr_eq(before, after);
        self.generators.iter().any(|generator| generator.states.as_ref().is_some_and(moved))
    }
}

/// The last states that blocks found, one for each device: those that draw nothing share one, and so do a block that
/// draws and the next one.
#[derive(Default)]
pub(crate) struct RngStates(RefCell<Vec<Rc<GeneratorState>>>);

impl RngStates {
    /// Where the device's generator stands.
    fn read(&self, device: Device) -> Result<Rc<GeneratorState>, ShimError> {
        match self.last(device) {
            Some(last) if last.stands()? => Ok(last),
            _ => Ok(self.keep(GeneratorState::read(device)?)),
        }
    }

    fn share(&self, state: GeneratorState) -> Result<Rc<GeneratorState>, ShimError> {
        match self.last(state.device) {
            Some(last) if last.equals(&state)? => Ok(last),
            _ => Ok(self.keep(state)),
        }
    }

    fn last(&self, device: Device) -> Option<Rc<GeneratorState>> {
        self.0.borrow().iter().find(|state| state.device == device).cloned()
    }

    fn keep(&self, state: GeneratorState) -> Rc<GeneratorState> {
        let state = Rc::new(state);
        let mut last = self.0.borrow_mut();
        last.retain(|other| other.device != state.device);
        last.push(Rc::clone(&state));
        state
    }
}

/// How a forward finds out what it draws.
enum Source {
    States(Vec<Rc<GeneratorState>>, #[expect(dead_code, reason = "held until it is dropped")] Option<DrawLock>),
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
    pub(crate) fn begin(policy: RngPolicy, cuda: Option<Device>, states: &RngStates) -> Result<Self, ShimError> {
        let devices: Vec<_> = [Some(Device::Cpu), cuda].into_iter().flatten().collect();
        let source = if policy.watches() {
            Source::Watch(DrawWatch::begin(cuda)?)
        } else {
            let lock = policy.lock();
            Source::States(devices.iter().map(|&device| states.read(device)).collect::<Result<_, _>>()?, lock)
        };
        let disturbed = !matches!(source, Source::Watch(_)) && !policy.serialize && ffi::several_threads();
        Ok(Self { policy, devices, source, disturbed, succeeded: false })
    }

    /// The state before the first draw; `None` if the callback saw none.
    fn before(&self, i: usize, states: &RngStates) -> Result<Option<Rc<GeneratorState>>, ShimError> {
        match &self.source {
            Source::States(states, _) => Ok(Some(Rc::clone(&states[i]))),
            Source::Watch(watch) => watch.before(self.devices[i])?.map(|state| states.share(state)).transpose(),
        }
    }

    fn generator(&self, i: usize, states: &RngStates) -> Result<Generator, ShimError> {
        let device = self.devices[i];
        let Some(before) = self.before(i, states)? else { return Ok(Generator { device, states: None }) };
        let after = if before.stands()? { Rc::clone(&before) } else { states.read(device)? };
        Ok(Generator { device, states: Some([before, after]) })
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
        for i in 0..self.devices.len() {
            if let Ok(Some(state)) = self.before(i, &RngStates::default()) {
                let _ = state.write();
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
    caller: Rc<GeneratorState>,
    /// The state in which the replay must leave it. `None`: others draw meanwhile, and any will do.
    expected: Option<Rc<GeneratorState>>,
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
        let device = || self.set.last().map_or(Device::Cpu, |generator| generator.caller.device);
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
                return Ok(Some(generator.caller.device));
            }
        }
        Ok(None)
    }
}

impl Drop for ReplayRng {
    fn drop(&mut self) {
        // Wherever they are now: a body that failed may have drawn or seeded although its forward did not.
        for generator in self.set.drain(..) {
            let _ = generator.caller.write();
        }
        if let Some((watch, devices)) = &self.watched {
            put_back(watch, devices);
        }
    }
}

/// Whether the device's generator is elsewhere than before the first operation that may draw: dropout in eval mode is
/// one, and draws nothing.
fn moved(watch: &DrawWatch, device: Device) -> Result<bool, ShimError> {
    watch.before(device)?.map_or(Ok(false), |before| Ok(!before.stands()?))
}

/// After a replay that drew although its forward did not.
fn put_back(watch: &DrawWatch, devices: &[Device]) {
    for &device in devices {
        if let Ok(Some(state)) = watch.before(device) {
            let _ = state.write();
        }
    }
}

impl SetGenerator {
    fn enter(generator: &Generator, unproven: bool) -> Result<Self, ShimError> {
        let (caller, expected) = match &generator.states {
            Some([before, after]) if before.stands()? => (Rc::clone(before), Rc::clone(after)),
            Some([before, after]) => {
                let caller = Rc::new(GeneratorState::read(generator.device)?);
                before.write()?;
                (caller, Rc::clone(after))
            }
            None => {
                let caller = Rc::new(GeneratorState::read(generator.device)?);
                (Rc::clone(&caller), caller)
            }
        };
        Ok(Self { caller, expected: (!unproven).then_some(expected) })
    }

    /// Whether it is where it should be.
    fn stands(&self) -> Result<bool, ShimError> {
        self.expected.as_ref().map_or(Ok(true), |expected| expected.stands())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is kept for one block whose body is `body`.
    fn record(states: &RngStates, body: impl FnOnce()) -> [Rc<GeneratorState>; 2] {
        let policy = RngPolicy { preserve: true, serialize: true };
        let rng = ForwardRng::begin(policy, None, states).unwrap();
        body();
        let mut record = rng.record("block", states).unwrap();
        rng.succeeded();
        record.generators.remove(0).states.expect("read, since no other thread has a rollout")
    }

    fn draw() {
        drop(tch::Tensor::rand([1], (tch::Kind::Float, Device::Cpu)));
    }

    /// Blocks that draw nothing share one state, with each other and with the one before them that drew.
    #[test]
    fn a_state_is_kept_only_where_the_block_drew() {
        let states = RngStates::default();
        let [first, after] = record(&states, || {});
        assert!(Rc::ptr_eq(&first, &after));
        let [second, after] = record(&states, draw);
        assert!(Rc::ptr_eq(&first, &second) && !Rc::ptr_eq(&second, &after));
        for _ in 0..10 {
            let [third, unmoved] = record(&states, || {});
            assert!(Rc::ptr_eq(&after, &third) && Rc::ptr_eq(&third, &unmoved));
        }
        draw();
        assert!(!Rc::ptr_eq(&after, &record(&states, || {})[0]));
    }

    /// A normal draw leaves its second half for the next one, which the engine's words do not show.
    #[test]
    fn a_waiting_half_of_a_pair_is_part_of_the_state() {
        let normal = || tch::Tensor::randn([1], (tch::Kind::Double, Device::Cpu)).double_value(&[0]);
        let before = GeneratorState::read(Device::Cpu).unwrap();
        normal();
        let waiting = GeneratorState::read(Device::Cpu).unwrap();
        let expected = normal();
        assert!(!waiting.stands().unwrap() && !waiting.equals(&before).unwrap());
        before.write().unwrap();
        assert!(before.stands().unwrap());
        waiting.write().unwrap();
        assert!(waiting.stands().unwrap() && waiting.equals(&GeneratorState::read(Device::Cpu).unwrap()).unwrap());
        assert_eq!(normal().to_bits(), expected.to_bits());
    }
}
