//! Guarantee *optimizers*: a step of the library's optimizer is that of tch's, to the last bit.

use replay_runtime::dist::Dist;
use replay_runtime::{Algorithm, Optimizer, ParameterStore, Rollout, Sharded, replay_block};
use replay_tests::ranks::{each_rank, piece};
use replay_tests::{randn, same_bits};
use tch::nn::{Adam, AdamW, Module, OptimizerConfig, RmsProp, Sgd};
use tch::{Device, Kind, Tensor, nn};

const WIDTH: i64 = 5;
const STEPS: usize = 6;
const LR: f64 = 0.02;

struct Layer {
    linear: nn::Linear,
    /// In every other step.
    sometimes: Tensor,
}

impl Layer {
    #[replay_block]
    fn forward(&self, x: &Tensor, #[meta] with: bool) -> Tensor {
        let y = x + self.linear.forward(x).tanh();
        if with { y * &self.sometimes } else { y }
    }
}

struct Model {
    vs: nn::VarStore,
    layer: Layer,
    ignored: Tensor,
}

impl Model {
    /// Three groups, of which one has but variables without elements and without use.
    fn new() -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let path = vs.root() / "layer";
        let random = nn::Init::Randn { mean: 0.0, stdev: 0.5 };
        let linear = nn::linear(&path / "linear", WIDTH, WIDTH, nn::LinearConfig::default());
        let sometimes = path.set_group(1).var("sometimes", &[], random);
        let ignored = vs.root().set_group(1).var("ignored", &[WIDTH], random);
        let _ = vs.root().set_group(3).var("empty", &[0, 3], random);
        let _ = vs.root().var("unused", &[2], random);
        let _ = vs.root().zeros_no_train("mean", &[2]);
        Self { vs, layer: Layer { linear, sometimes }, ignored }
    }

    fn shard<'d>(&self, dist: &'d Dist) -> Sharded<'d> {
        Sharded::builder(dist, &self.vs).unit("layer", &self.layer).ignore("ignored").build().unwrap()
    }

    fn backward(&self, store: &impl ParameterStore, step: usize) {
        let rollout = Rollout::new(store);
        let mut x = randn(10 + i64::try_from(step).unwrap(), &[4, WIDTH], Kind::Float);
        for _ in 0..2 {
            x = self.layer.forward_replay(&rollout, &x, step % 2 == 1).unwrap();
        }
        let loss = (x * &self.ignored).square().mean(Kind::Float);
        rollout.backward(&loss).unwrap();
    }
}

/// What both kinds of optimizers are told between steps.
#[derive(Clone, Copy)]
enum Change {
    None,
    Lr(f64),
    LrGroup(usize, f64),
    Momentum(f64),
    MomentumGroup(usize, f64),
    Decay(f64),
    DecayGroup(usize, f64),
}

impl Change {
    fn tell(self, theirs: &mut nn::Optimizer, ours: &mut Optimizer) {
        match self {
            Self::None => {}
            Self::Lr(lr) => {
                theirs.set_lr(lr);
                ours.set_lr(lr).unwrap();
            }
            Self::LrGroup(group, lr) => {
                theirs.set_lr_group(group, lr);
                ours.set_lr_group(group, lr).unwrap();
            }
            Self::Momentum(momentum) => {
                theirs.set_momentum(momentum);
                ours.set_momentum(momentum).unwrap();
            }
            Self::MomentumGroup(group, momentum) => {
                // tch sets it and then says that it could not, for all but SGD.
                theirs.set_momentum_group(group, momentum);
                ours.set_momentum_group(group, momentum).unwrap();
            }
            Self::Decay(decay) => {
                theirs.set_weight_decay(decay);
                ours.set_weight_decay(decay).unwrap();
            }
            Self::DecayGroup(group, decay) => {
                theirs.set_weight_decay_group(group, decay);
                ours.set_weight_decay_group(group, decay).unwrap();
            }
        }
    }
}

/// What it says before the steps with odd numbers.
fn changes(momentum: bool, group_momentum: bool) -> [Change; 6] {
    [
        Change::LrGroup(1, 0.003),
        if momentum { Change::Momentum(0.6) } else { Change::None },
        Change::Decay(0.05),
        Change::DecayGroup(0, 0.2),
        if group_momentum { Change::MomentumGroup(1, 0.7) } else { Change::None },
        Change::Lr(0.01),
    ]
}

/// Trains `model` by `store` with ours, and `reference` in one process with tch's.
fn compare<C: OptimizerConfig + Into<Algorithm> + Copy + std::fmt::Debug>(
    config: C,
    changes: &[Change],
    model: &Model,
    store: &impl ParameterStore,
    ranks: (usize, usize),
) {
    let reference = Model::new();
    let mut theirs = config.build(&reference.vs, LR).unwrap();
    let mut ours = Optimizer::new(store, config, LR).unwrap();
    for step in 0..STEPS {
        changes.get(step).copied().unwrap_or(Change::None).tell(&mut theirs, &mut ours);
        theirs.zero_grad();
        ours.zero_grad();
        assert!(model.vs.trainable_variables().iter().all(|variable| !variable.grad().defined()));
        reference.backward(&reference.vs, step);
        model.backward(store, step);
        theirs.step();
        ours.step().unwrap();
        let expected = reference.vs.variables();
        for (name, found) in model.vs.variables() {
            let whole = ["ignored", "mean"].contains(&name.as_str()) || expected[&name].size() == found.size();
            let expected =
                if whole { expected[&name].shallow_clone() } else { piece(&expected[&name], ranks.0, ranks.1) };
            assert!(same_bits(&expected.detach(), &found.detach()), "{name} after step {step} with {config:?}");
        }
    }
    let lr = if changes.is_empty() { LR } else { 0.01 };
    assert_eq!((ours.lr(0).unwrap(), ours.lr(1).unwrap()), (lr, lr));
}

/// Every algorithm with several sets of options, with options that change and without.
fn compare_all(model: impl Fn() -> Model, with: impl Fn(&Model, &dyn Fn(&Model, Store<'_, '_>))) {
    macro_rules! all {
        ($momentum:expr, $group:expr, $($config:expr),+ $(,)?) => {$({
            for changes in [&[][..], &changes($momentum, $group)] {
                let run = |model: &Model, store: Store<'_, '_>| match store {
                    Store::Plain => compare($config, changes, model, &model.vs, (0, 1)),
                    Store::Sharded(sharded) => {
                        let dist = sharded.dist();
                        compare($config, changes, model, sharded, (dist.rank(), dist.world()));
                    }
                };
                with(&model(), &run);
            }
        })+};
    }
    all!(
        true,
        true,
        Sgd::default(),
        Sgd { momentum: 0.9, ..Sgd::default() },
        Sgd { momentum: 0.9, dampening: 0.3, wd: 0.1, ..Sgd::default() },
        Sgd { momentum: 0.9, wd: 0.1, nesterov: true, ..Sgd::default() },
    );
    all!(false, false, Adam::default(), Adam::default().wd(0.1).eps(1e-3), Adam::default().amsgrad(true).beta1(0.7));
    all!(false, false, AdamW::default(), AdamW::default().wd(0.3).beta2(0.9), AdamW::default().amsgrad(true).eps(1e-4));
    all!(false, false, RmsProp::default(), RmsProp { wd: 0.1, centered: true, ..RmsProp::default() });
    all!(
        true,
        false,
        RmsProp { momentum: 0.9, alpha: 0.9, ..RmsProp::default() },
        RmsProp { momentum: 0.9, eps: 1e-3, centered: true, ..RmsProp::default() },
    );
}

enum Store<'s, 'd> {
    Plain,
    Sharded(&'s Sharded<'d>),
}

#[test]
fn steps_are_those_of_tch() {
    compare_all(Model::new, |model, run| run(model, Store::Plain));
}

#[test]
fn steps_of_a_world_of_one_are_those_of_tch() {
    let dist = Dist::single();
    compare_all(Model::new, |model, run| run(model, Store::Sharded(&model.shard(&dist))));
    dist.shutdown().unwrap();
}

/// All ranks have the same batch, so that the mean of their gradients is the gradient.
#[test]
fn steps_of_pieces_are_those_of_tch() {
    each_rank("steps_of_pieces_are_those_of_tch", &[2], |dist| {
        compare_all(Model::new, |model, run| run(model, Store::Sharded(&model.shard(&dist))));
        dist.shutdown().unwrap();
    });
}

fn message<T>(result: Result<T, replay_runtime::TorchError>) -> String {
    result.err().expect("it is refused").to_string()
}

#[test]
fn a_group_that_does_not_exist_is_an_error() {
    let model = Model::new();
    let mut optimizer = Optimizer::new(&model.vs, Sgd { momentum: 0.5, ..Sgd::default() }, LR).unwrap();
    for text in [
        message(optimizer.lr(2)),
        message(optimizer.set_lr_group(2, 0.1)),
        message(optimizer.set_momentum_group(2, 0.1)),
        message(optimizer.set_weight_decay_group(2, 0.1)),
    ] {
        assert_eq!(text, "no variable of the optimizer is in group 2; its groups: 0, 1, 3");
    }
    let empty = nn::VarStore::new(Device::Cpu);
    let mut optimizer = Optimizer::new(&empty, Sgd::default(), LR).unwrap();
    assert_eq!(message(optimizer.lr(0)), "no variable of the optimizer is in group 0; its groups: none");
    optimizer.step().unwrap();
}

#[test]
fn a_momentum_where_there_is_none_is_an_error() {
    let model = Model::new();
    let configs: [(Algorithm, &str); 2] = [(Adam::default().into(), "Adam"), (AdamW::default().into(), "AdamW")];
    for (config, name) in configs {
        let mut optimizer = Optimizer::new(&model.vs, config, LR).unwrap();
        for text in [message(optimizer.set_momentum(0.5)), message(optimizer.set_momentum_group(1, 0.5))] {
            assert_eq!(text, format!("{name} has no momentum: it has betas, which stay as they were"));
        }
    }
}

#[test]
fn options_out_of_range_are_errors() {
    let model = Model::new();
    for lr in [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let configs: [Algorithm; 4] =
            [Sgd::default().into(), Adam::default().into(), AdamW::default().into(), RmsProp::default().into()];
        for config in configs {
            let text = message(Optimizer::new(&model.vs, config, lr));
            assert!(text.contains("learning rate"), "{config:?}, {lr}: {text}");
            let mut optimizer = Optimizer::new(&model.vs, config, LR).unwrap();
            for text in [message(optimizer.set_lr(lr)), message(optimizer.set_lr_group(1, lr))] {
                assert!(text.contains("learning rate of"), "{config:?}, {lr}: {text}");
            }
            assert!(message(optimizer.set_weight_decay(lr)).contains("weight decay of"));
            assert_eq!((optimizer.lr(0).unwrap(), optimizer.lr(1).unwrap()), (LR, LR));
        }
    }
    let text = message(Optimizer::new(&model.vs, Adam::default().beta1(1.5), LR));
    assert!(text.contains("beta parameter at index 0"), "{text}");
    let nesterov = Sgd { nesterov: true, ..Sgd::default() };
    assert!(message(Optimizer::new(&model.vs, nesterov, LR)).contains("Nesterov"));
    let mut optimizer = Optimizer::new(&model.vs, RmsProp::default(), LR).unwrap();
    assert!(message(optimizer.set_momentum(-0.5)).contains("momentum of -0.5"));
}

#[test]
fn a_sparse_gradient_changes_nothing_where_there_is_no_step_for_it() {
    let vs = nn::VarStore::new(Device::Cpu);
    let config = nn::EmbeddingConfig { sparse: true, ..nn::EmbeddingConfig::default() };
    let dense = vs.root().var("a", &[2], nn::Init::Const(1.0));
    let table = nn::embedding(vs.root() / "b", 4, 2, config);
    let ids = Tensor::from_slice(&[1_i64, 3]);
    (table.forward(&ids) * &dense).sum(Kind::Float).backward();
    let mut optimizer = Optimizer::new(&vs, AdamW::default(), LR).unwrap();
    let text = message(optimizer.step());
    assert_eq!(text, "the gradient of parameter `b.weight` is sparse, for which this optimizer has no step");
    assert_eq!(Vec::<f32>::try_from(&dense).unwrap(), [1.0, 1.0]);
    Optimizer::new(&vs, Sgd { momentum: 0.9, ..Sgd::default() }, LR).unwrap().step().unwrap();
}

/// A rollout's store is whole meanwhile; a step then would be lost, or make a state of the wrong size.
#[test]
fn a_step_while_a_rollout_lives_is_an_error() {
    each_rank("a_step_while_a_rollout_lives_is_an_error", &[2], |dist| {
        let model = Model::new();
        let sharded = model.shard(&dist);
        let mut optimizer = Optimizer::new(&sharded, AdamW::default(), LR).unwrap();
        let mut late = None;
        let unused = model.vs.variables()["unused"].shallow_clone();
        {
            let _rollout = Rollout::new(&sharded);
            unused.square().sum(Kind::Float).backward();
            let text = message(optimizer.step());
            assert!(text.contains("`unused` was [1] when the optimizer was made, and is [2]"), "{text}");
            late.replace(Optimizer::new(&sharded, AdamW::default(), LR).unwrap());
        }
        optimizer.zero_grad();
        unused.square().sum(Kind::Float).backward();
        optimizer.step().unwrap();
        let text = message(late.unwrap().step());
        assert!(text.contains("`unused` was [2] when the optimizer was made, and is [1]"), "{text}");
        dist.shutdown().unwrap();
    });
}

/// Else the ranks' pieces would go apart.
#[test]
fn ranks_with_different_groups_are_an_error() {
    each_rank("ranks_with_different_groups_are_an_error", &[2], |dist| {
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = vs.root().set_group(dist.rank()).var("a", &[4], nn::Init::Const(1.0));
        let error = Sharded::builder(&dist, &vs).build().unwrap_err().to_string();
        assert!(error.contains("the parameters differ"), "{error}");
    });
}

#[test]
fn it_outlives_its_store_and_trains_what_it_was_made_with() {
    let vs = nn::VarStore::new(Device::Cpu);
    let variable = vs.root().var("a", &[2], nn::Init::Const(1.0));
    let mut optimizer = Optimizer::new(&vs, Sgd::default(), 0.5).unwrap();
    let late = vs.root().var("b", &[2], nn::Init::Const(1.0));
    (&variable + &late).sum(Kind::Float).backward();
    drop(vs);
    optimizer.step().unwrap();
    optimizer.zero_grad();
    assert_eq!(Vec::<f32>::try_from(&variable).unwrap(), [0.5, 0.5]);
    assert_eq!(Vec::<f32>::try_from(&late).unwrap(), [1.0, 1.0]);
    assert!(late.grad().defined() && !variable.grad().defined());
    optimizer.step().unwrap();
    drop((variable, late));
    drop(optimizer);
}
