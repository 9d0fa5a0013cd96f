//! Guarantee *contexts*: the scope of a block's context is open around its forward and around each replay, of the block
//! itself and of blocks inside it, and is closed on errors and on unwind.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use replay_runtime::{BoxError, Pass, ReplayContext, ReplayError, Rollout, is_replaying, replay_block};
use replay_tests::{Setup, bytes, randn};
use tch::{Kind, Tensor, nn};

/// A model whose steps read a scale that changes from step to step.
struct World {
    w: Tensor,
    scale: Cell<f64>,
    log: RefCell<Vec<&'static str>>,
    refuse: Cell<Option<Pass>>,
}

/// The scale as it was at the forward.
struct Scale<'m>(&'m World, f64);

struct Put<'s>(&'s World, f64);

impl Drop for Put<'_> {
    fn drop(&mut self) {
        self.0.scale.set(self.1);
        self.0.log.borrow_mut().push("closed");
    }
}

impl Scale<'_> {
    fn open(&self, pass: Pass, name: &'static str) -> Result<Put<'_>, BoxError> {
        if self.0.refuse.get() == Some(pass) {
            return Err("no scale today".into());
        }
        self.0.log.borrow_mut().push(name);
        Ok(Put(self.0, self.0.scale.replace(self.1)))
    }
}

impl ReplayContext for Scale<'_> {
    type Scope<'s>
        = Put<'s>
    where
        Self: 's;

    fn forward(&self) -> Result<Put<'_>, BoxError> {
        self.open(Pass::Forward, "forward")
    }

    fn replay(&self) -> Result<Put<'_>, BoxError> {
        self.open(Pass::Replay, "replay")
    }
}

impl World {
    fn new(path: &nn::Path<'_>) -> Self {
        let w = path.var("w", &[4], nn::Init::Const(0.5));
        Self { w, scale: Cell::new(1.0), log: RefCell::default(), refuse: Cell::new(None) }
    }

    fn snapshot(&self) -> Scale<'_> {
        Scale(self, self.scale.get())
    }

    #[replay_block(context = Self::snapshot)]
    fn step(&self, x: &Tensor) -> Tensor {
        (x * &self.w).tanh() * self.scale.get()
    }

    #[replay_block]
    fn bare(&self, x: &Tensor) -> Tensor {
        (x * &self.w).tanh() * self.scale.get()
    }

    #[replay_block(context = Self::snapshot)]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        let h = self.bare_replay(rollout, x)?;
        self.bare_replay(rollout, &h)
    }

    #[replay_block(context = Self::snapshot)]
    fn panics(&self, x: &Tensor) -> Tensor {
        assert!(!is_replaying(), "only once");
        x * &self.w
    }
}

fn x() -> Tensor {
    randn(1, &[4], Kind::Float)
}

/// The gradient of three steps with scales 1, 2 and 3, one use of the weight in each: plain autograd's bits.
fn gradient(steps: impl for<'m> Fn(&'m World, Option<&Rollout<'m>>, &Tensor) -> Tensor, replay: bool) -> Vec<u8> {
    let setup = Setup::new(World::new);
    let world = &setup.model;
    let rollout = replay.then(|| Rollout::new(&setup.vs));
    let mut h = x();
    for scale in [1.0, 2.0, 3.0] {
        world.scale.set(scale);
        h = steps(world, rollout.as_ref(), &h);
    }
    world.scale.set(17.0);
    let loss = h.square().sum(Kind::Float);
    match rollout {
        Some(rollout) => drop(rollout.backward(&loss).unwrap()),
        None => loss.backward(),
    }
    assert_eq!(world.scale.get().to_bits(), 17f64.to_bits(), "all scopes are closed");
    bytes(&world.w.grad())
}

#[test]
fn a_replay_sees_the_state_of_its_forward() {
    fn step<'m>(world: &'m World, rollout: Option<&Rollout<'m>>, h: &Tensor) -> Tensor {
        rollout.map_or_else(|| world.step(h), |rollout| world.step_replay(rollout, h).unwrap())
    }
    assert_eq!(gradient(step, false), gradient(step, true));
}

/// The inner blocks have no context of their own, and are replayed after the outer body has ended.
#[test]
fn blocks_inside_the_block_are_replayed_in_its_scope() {
    fn outer<'m>(world: &'m World, rollout: Option<&Rollout<'m>>, h: &Tensor) -> Tensor {
        let plain = || world.bare(&world.bare(h));
        rollout.map_or_else(plain, |rollout| world.outer_replay(rollout, h).unwrap())
    }
    let (plain, replayed) = (gradient(outer, false), gradient(outer, true));
    assert_eq!(plain, replayed);
}

#[test]
fn scopes_are_closed_on_unwind() {
    let setup = Setup::new(World::new);
    let rollout = Rollout::new(&setup.vs);
    let y = setup.model.panics_replay(&rollout, &x()).unwrap();
    let loss = y.sum(Kind::Float);
    assert!(catch_unwind(AssertUnwindSafe(|| rollout.backward(&loss))).is_err());
    assert_eq!(*setup.model.log.borrow(), ["forward", "closed", "replay", "closed"]);
}

#[test]
fn a_context_that_cannot_be_entered_is_an_error() {
    let setup = Setup::new(World::new);
    let world = &setup.model;
    for pass in [Pass::Forward, Pass::Replay] {
        world.refuse.set(Some(pass));
        let rollout = Rollout::new(&setup.vs);
        let result = world.step_replay(&rollout, &x()).and_then(|y| rollout.backward(&y.sum(Kind::Float)));
        let error = result.unwrap_err();
        assert!(matches!(&error, ReplayError::Context { pass: found, .. } if *found == pass), "{error}");
        assert!(error.to_string().contains("no scale today") && !world.w.grad().defined());
    }
}

/// Blocks inside each other, each with a context of its own that logs.
struct Layers {
    w: Tensor,
    log: RefCell<Vec<String>>,
}

struct Layer<'m>(&'m Layers, &'static str);

struct Opened<'s>(&'s Layer<'s>);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.0.log.borrow_mut().push(format!("{} closed", self.0.1));
    }
}

impl ReplayContext for Layer<'_> {
    type Scope<'s>
        = Option<Opened<'s>>
    where
        Self: 's;

    fn forward(&self) -> Result<Self::Scope<'_>, BoxError> {
        Ok(None)
    }

    fn replay(&self) -> Result<Self::Scope<'_>, BoxError> {
        self.0.log.borrow_mut().push(self.1.to_owned());
        Ok(Some(Opened(self)))
    }
}

impl Layers {
    fn first(&self) -> Layer<'_> {
        Layer(self, "outer")
    }

    fn second(&self) -> Layer<'_> {
        Layer(self, "middle")
    }

    fn third(&self) -> Layer<'_> {
        Layer(self, "inner")
    }

    #[replay_block(context = Self::first)]
    fn outer<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        self.middle_replay(rollout, x)
    }

    #[replay_block(context = Self::second)]
    fn middle<'m>(&'m self, rollout: &Rollout<'m>, x: &Tensor) -> Result<Tensor, ReplayError> {
        self.inner_replay(rollout, x)
    }

    #[replay_block(context = Self::third)]
    fn inner(&self, x: &Tensor) -> Tensor {
        x * &self.w
    }
}

/// A replay opens the scopes of all blocks around its own, the outermost first, and closes them the other way round.
#[test]
fn scopes_are_inside_each_other_as_the_blocks_are() {
    let setup = Setup::new(|path| Layers { w: path.var("w", &[4], nn::Init::Const(0.5)), log: RefCell::default() });
    let rollout = Rollout::new(&setup.vs);
    let y = setup.model.outer_replay(&rollout, &x()).unwrap();
    rollout.backward(&y.sum(Kind::Float)).unwrap();
    let outer = ["outer", "outer closed"];
    let middle = ["outer", "middle", "middle closed", "outer closed"];
    let inner = ["outer", "middle", "inner", "inner closed", "middle closed", "outer closed"];
    assert_eq!(*setup.model.log.borrow(), [&outer[..], &middle, &inner].concat());
}
