//! All guarantees, for every combination of what the builder offers: each gives plain autograd's gradient, or an error
//! that says why. Public choices of the builder that are missing here fail the last test.

use replay_runtime::{AutocastGuard, Check, EarlyStop, Keep, ReplayError, Rollout, RolloutBuilder, is_replaying};
use replay_tests::{Setup, randn, same_bits};
use tch::{Device, Kind, Tensor, nn};

/// One choice: its name in the builder, and how it is made.
type Choice = (&'static str, fn(RolloutBuilder<'_>) -> RolloutBuilder<'_>);

/// The choices that are not the default's.
const CHOICES: [Choice; 9] = [
    ("offload", |builder| builder.offload(true)),
    ("accumulate_in", |builder| builder.accumulate_in(Kind::Float)),
    ("restore_gradients", |builder| builder.restore_gradients(false)),
    ("check", |builder| builder.check(Check::Values)),
    ("serialize_rng", |builder| builder.serialize_rng(false)),
    ("device", |builder| builder.device(Device::Cpu)),
    // So little that each graph is given up: what is kept is not replayed, and could not fail.
    ("keep_graphs", |builder| builder.keep_graphs(Keep::Bytes(1))),
    ("early_stop", |builder| builder.early_stop(EarlyStop::Always)),
    ("preserve_rng_state", |builder| builder.preserve_rng_state(false)),
];

/// Whether the set has the last choice, with which a block that draws is an error.
fn refuses_draws(set: usize) -> bool {
    set >> (CHOICES.len() - 1) & 1 == 1
}

/// What stands around a rollout.
#[derive(Clone, Copy, Debug)]
struct Around {
    second_store: bool,
    old_gradients: bool,
    autocast: bool,
}

struct Stores {
    vs: nn::VarStore,
    w: Tensor,
    other: nn::VarStore,
    v: Tensor,
}

impl Stores {
    fn new(around: Around) -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let other = nn::VarStore::new(Device::Cpu);
        let w = vs.root().var_copy("w", &randn(1, &[4, 4], Kind::Float));
        let v = other.root().var_copy("v", &randn(2, &[4], Kind::Float));
        if around.old_gradients {
            (w.sum(Kind::Float) + v.sum(Kind::Float)).backward();
        }
        Self { vs, w, other, v }
    }

    fn grads(&self) -> [Tensor; 2] {
        [self.w.grad(), self.v.grad()]
    }
}

/// Applies the choices that `set` has a bit for.
fn builder(stores: &Stores, around: Around, set: usize) -> RolloutBuilder<'_> {
    let builder = Rollout::builder(&stores.vs);
    let builder = if around.second_store { builder.store(&stores.other) } else { builder };
    CHOICES
        .iter()
        .enumerate()
        .filter(|(i, _)| set >> i & 1 == 1)
        .fold(builder, |builder, (_, (_, choose))| choose(builder))
}

/// What the tiny program does beside its sums.
#[derive(Clone, Copy, Default)]
struct Act {
    draw: bool,
    fail: bool,
}

/// One tiny block, inside another, by plain calls where there is no rollout.
fn tiny<'m>(rollout: Option<&Rollout<'m>>, stores: &'m Stores, act: Act) -> Result<Tensor, ReplayError> {
    let body = move |i: &[Tensor]| (i[0].matmul(&stores.w) * &stores.v).dropout(0.3, act.draw);
    tch::manual_seed(5);
    let x = Tensor::ones([3, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let y = match rollout {
        None => body(&[x]),
        Some(rollout) => rollout.block("outer", &[("x", &x)], move |rollout, i| {
            let y = rollout.block("inner", &[("x", &i[0])], move |_, i| body(i))?;
            if act.fail && is_replaying() { Err(ReplayError::Inference) } else { Ok(y) }
        })?,
    };
    Ok(y.to_kind(Kind::Float).square().sum(Kind::Float))
}

fn run(around: Around, set: Option<usize>, draw: bool) -> [Tensor; 2] {
    let stores = Stores::new(around);
    let rollout = set.map(|set| builder(&stores, around, set).build());
    let autocast = around.autocast.then(|| AutocastGuard::new(Device::Cpu, Kind::BFloat16));
    let loss = tiny(rollout.as_ref(), &stores, Act { draw, fail: false }).unwrap();
    drop(autocast);
    match rollout {
        Some(rollout) => drop(rollout.backward(&loss).unwrap()),
        None => loss.backward(),
    }
    stores.grads()
}

fn surroundings() -> impl Iterator<Item = Around> {
    (0..8).map(|bits| Around { second_store: bits & 1 != 0, old_gradients: bits & 2 != 0, autocast: bits & 4 != 0 })
}

/// One use of each weight: plain autograd's bits.
#[test]
fn every_combination_is_exact() {
    for around in surroundings() {
        for draw in [true, false] {
            let expected = run(around, None, draw);
            for set in (0..1 << CHOICES.len()).filter(|set| !(draw && refuses_draws(*set))) {
                let found = run(around, Some(set), draw);
                let same = expected.iter().zip(&found).all(|(a, b)| same_bits(a, b));
                assert!(same, "{around:?}, choices {set:b}");
            }
        }
    }
}

#[test]
fn every_combination_without_the_generators_state_refuses_draws() {
    for around in surroundings() {
        for set in (0..1 << CHOICES.len()).filter(|set| refuses_draws(*set)) {
            let stores = Stores::new(around);
            let rollout = builder(&stores, around, set).build();
            let outcome = tiny(Some(&rollout), &stores, Act { draw: true, fail: false });
            // The inner block's error is the outer one's source.
            let text = format!("{:?}", outcome.unwrap_err());
            assert!(text.contains("`inner` draws random numbers"), "{text}");
        }
    }
}

/// A replay that fails is an error whatever was chosen, and gradients are as before where they are to be put back.
#[test]
fn every_combination_fails_cleanly() {
    for around in surroundings() {
        for set in 0..1 << CHOICES.len() {
            let stores = Stores::new(around);
            let before = stores.grads();
            let rollout = builder(&stores, around, set).build();
            let loss = tiny(Some(&rollout), &stores, Act { draw: false, fail: true }).unwrap();
            assert!(matches!(rollout.backward(&loss), Err(ReplayError::Block { .. })), "{around:?}, choices {set:b}");
            let unchanged =
                |(a, b): (&Tensor, &Tensor)| a.defined() == b.defined() && (!a.defined() || same_bits(a, b));
            assert!(before.iter().zip(&stores.grads()).all(unchanged), "{around:?}, choices {set:b}");
            assert!(stores.w.exp().requires_grad());
        }
    }
}

/// A default that is asked for is the default.
#[test]
fn defaults_can_be_said() {
    let setup = Setup::new(|path| path.var("w", &[1], nn::Init::Const(2.0)));
    let said = Rollout::builder(&setup.vs).offload(false).restore_gradients(true).check(Check::default());
    let said = said.serialize_rng(true).preserve_rng_state(true).keep_graphs(Keep::None).early_stop(EarlyStop::Marked);
    assert_eq!(format!("{said:?}"), format!("{:?}", Rollout::builder(&setup.vs)));
}

/// Reads the builder's source: each public choice is tried here.
#[test]
fn no_choice_is_missing() {
    let sources = ["rollout.rs", "rollout/accumulate.rs"].map(|file| {
        let path = format!("{}/../replay-runtime/src/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    });
    let builders = [(&sources[0], "impl<'m> RolloutBuilder<'m> {"), (&sources[1], "impl RolloutBuilder<'_> {")];
    let builders = builders.map(|(source, header)| source.split(header).nth(1).expect("the builder"));
    let builders = builders.iter().filter_map(|builder| builder.split("\n}\n").next());
    let public: Vec<_> = builders
        .flat_map(|builder| builder.split("pub fn ").skip(1).map(|text| text.split(['(', '<']).next().unwrap()))
        .collect();
    let tried: Vec<_> = CHOICES.iter().map(|(name, _)| *name).chain(["store", "build"]).collect();
    assert!(public.len() > 2, "{public:?}");
    assert!(public.iter().all(|choice| tried.contains(choice)), "{public:?} are offered, {tried:?} are tried");
}
