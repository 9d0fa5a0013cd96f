//! LibTorch's optimizers, owned here, so that their state can be read and set.

use std::collections::HashSet;
use std::fmt;

use tch::{Tensor, nn};

use crate::ffi::{self, OptimizerKind, OptimizerOptions, RawOptimizer, Setting, ShimError};
use crate::store::{Parameter, ParameterStore};
use crate::torch_error::TorchError;

/// What an [`Optimizer`] does in a step, with the options of tch's own configuration.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Algorithm {
    /// Stochastic gradient descent, with momentum where it has one.
    Sgd(nn::Sgd),
    /// Adam; weight decay is added to the gradient.
    Adam(nn::Adam),
    /// Adam with weight decay apart from the gradient.
    AdamW(nn::AdamW),
    /// The gradient over a running mean of its size.
    RmsProp(nn::RmsProp),
}

impl From<nn::Sgd> for Algorithm {
    fn from(config: nn::Sgd) -> Self {
        Self::Sgd(config)
    }
}

impl From<nn::Adam> for Algorithm {
    fn from(config: nn::Adam) -> Self {
        Self::Adam(config)
    }
}

impl From<nn::AdamW> for Algorithm {
    fn from(config: nn::AdamW) -> Self {
        Self::AdamW(config)
    }
}

impl From<nn::RmsProp> for Algorithm {
    fn from(config: nn::RmsProp) -> Self {
        Self::RmsProp(config)
    }
}

impl Algorithm {
    fn name(self) -> &'static str {
        match self {
            Self::Sgd(_) => "SGD",
            Self::Adam(_) => "Adam",
            Self::AdamW(_) => "AdamW",
            Self::RmsProp(_) => "RMSprop",
        }
    }

    fn options(self, lr: f64) -> (OptimizerKind, OptimizerOptions) {
        let none = OptimizerOptions { lr, ..OptimizerOptions::default() };
        match self {
            Self::Sgd(nn::Sgd { momentum, dampening, wd, nesterov }) => {
                let nesterov = nesterov.into();
                (OptimizerKind::Sgd, OptimizerOptions { momentum, dampening, weight_decay: wd, nesterov, ..none })
            }
            Self::Adam(nn::Adam { beta1, beta2, wd, eps, amsgrad }) => {
                let amsgrad = amsgrad.into();
                (OptimizerKind::Adam, OptimizerOptions { beta1, beta2, weight_decay: wd, eps, amsgrad, ..none })
            }
            Self::AdamW(nn::AdamW { beta1, beta2, wd, eps, amsgrad }) => {
                let amsgrad = amsgrad.into();
                (OptimizerKind::AdamW, OptimizerOptions { beta1, beta2, weight_decay: wd, eps, amsgrad, ..none })
            }
            Self::RmsProp(nn::RmsProp { alpha, eps, wd, momentum, centered }) => {
                let centered = centered.into();
                (OptimizerKind::RmsProp, OptimizerOptions { alpha, eps, weight_decay: wd, momentum, centered, ..none })
            }
        }
    }
}

/// The optimizer of LibTorch's that tch has too, for a [`VarStore`](nn::VarStore) or a [`Sharded`](crate::Sharded) store.
///
/// It does the same to the last bit. tch keeps the state of its optimizers to itself, so that training cannot go on where it was
/// interrupted; that of this one can be kept.
///
/// It trains the variables that were made to be trained when it was made, each in the [group](nn::Path::set_group) that it
/// had then. One that is added to the store later is not trained, unlike with tch's. Make it after a store is
/// [cut](crate::ShardedBuilder::build), and while no rollout of that store lives: its state is of the size of the pieces.
///
/// ```no_run
/// # use replay_runtime::{Optimizer, Rollout, replay_block};
/// # use tch::{Device, Kind, Tensor, nn};
/// # struct Cell(nn::Linear);
/// # impl Cell {
/// #     #[replay_block]
/// #     fn step(&self, x: &Tensor) -> Tensor { x.apply(&self.0).tanh() }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vs = nn::VarStore::new(Device::Cpu);
/// let cell = Cell(nn::linear(vs.root(), 64, 64, Default::default()));
/// let mut optimizer = Optimizer::new(&vs, nn::AdamW::default(), 1e-3)?;
///
/// for step in 0..100 {
///     let rollout = Rollout::new(&vs);
///     let x = cell.step_replay(&rollout, &Tensor::randn([32, 64], (Kind::Float, Device::Cpu)))?;
///     rollout.backward(&x.square().mean(Kind::Float))?;
///     optimizer.set_lr(1e-3 * 0.99_f64.powi(step))?;
///     optimizer.step()?;
///     optimizer.zero_grad();
/// }
/// # Ok(())
/// # }
/// ```
pub struct Optimizer {
    raw: RawOptimizer,
    algorithm: Algorithm,
    /// By name; the position is the number in `raw`.
    parameters: Vec<Parameter>,
    /// Those that a parameter is in, ascending; the position is the number in `raw`.
    groups: Vec<usize>,
}

impl Optimizer {
    /// One for all variables of the store that were made to be trained, also those that are frozen now.
    ///
    /// # Errors
    /// What LibTorch says of the options; a learning rate that is negative or not finite.
    pub fn new(store: &impl ParameterStore, algorithm: impl Into<Algorithm>, lr: f64) -> Result<Self, TorchError> {
        let algorithm = algorithm.into();
        let mut parameters = store.parameters();
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        let mut seen = HashSet::new();
        parameters.retain(|parameter| seen.insert(ffi::identity(&parameter.tensor)));
        let mut groups: Vec<_> = parameters.iter().map(|parameter| parameter.group).collect();
        groups.sort_unstable();
        groups.dedup();

        let (kind, options) = algorithm.options(lr);
        let mut raw = RawOptimizer::new(kind, &options)?;
        for _ in &groups {
            raw.add_group()?;
        }
        let mut optimizer = Self { raw, algorithm, parameters, groups };
        for Parameter { name, tensor, group } in &optimizer.parameters {
            let group = optimizer.group(*group)?;
            optimizer.raw.add_parameter(name, tensor, group)?;
        }
        Ok(optimizer)
    }

    /// One step of each variable that has a gradient.
    ///
    /// # Errors
    /// If a gradient, or the state of earlier steps, does not fit its variable: as of a sharded store while a rollout of it
    /// lives, or of a variable that was moved to another device. Then nothing has changed. What LibTorch itself refuses on
    /// its way, as a kind of numbers that it cannot compute with, may be between two variables' steps.
    pub fn step(&mut self) -> Result<(), TorchError> {
        Ok(self.raw.step()?)
    }

    /// Undefines the gradients of all variables that it trains.
    pub fn zero_grad(&mut self) {
        for parameter in &self.parameters {
            // A field that is set to nothing cannot be refused.
            let _ = ffi::set_grad(&parameter.tensor, None);
        }
    }

    /// The learning rate of a group.
    ///
    /// # Errors
    /// If no variable is in that group.
    pub fn lr(&self, group: usize) -> Result<f64, TorchError> {
        Ok(self.raw.lr(self.group(group)?)?)
    }

    /// Sets the learning rate of all groups.
    ///
    /// # Errors
    /// If it is negative or not finite.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), TorchError> {
        self.set_all(Setting::Lr, lr)
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// If no variable is in that group, or as for [`set_lr`](Self::set_lr).
    pub fn set_lr_group(&mut self, group: usize, lr: f64) -> Result<(), TorchError> {
        self.set(group, Setting::Lr, lr)
    }

    /// Sets the momentum of all groups.
    ///
    /// # Errors
    /// If it is negative or not finite, or the algorithm has none: tch sets the first beta of Adam and `AdamW` instead, this
    /// does not.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<(), TorchError> {
        self.set_all(Setting::Momentum, momentum)
    }

    /// Sets the momentum of one group.
    ///
    /// # Errors
    /// If no variable is in that group, or as for [`set_momentum`](Self::set_momentum).
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<(), TorchError> {
        self.set(group, Setting::Momentum, momentum)
    }

    /// Sets the weight decay of all groups.
    ///
    /// # Errors
    /// If it is negative or not finite.
    pub fn set_weight_decay(&mut self, weight_decay: f64) -> Result<(), TorchError> {
        self.set_all(Setting::WeightDecay, weight_decay)
    }

    /// Sets the weight decay of one group.
    ///
    /// # Errors
    /// If no variable is in that group, or as for [`set_weight_decay`](Self::set_weight_decay).
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<(), TorchError> {
        self.set(group, Setting::WeightDecay, weight_decay)
    }

    /// The number of a group in `raw`.
    fn group(&self, group: usize) -> Result<usize, ShimError> {
        self.groups.binary_search(&group).map_err(|_| {
            let known: Vec<_> = self.groups.iter().map(ToString::to_string).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            ShimError::refused(format!("no variable of the optimizer is in group {group}; its groups: {known}"))
        })
    }

    fn set(&mut self, group: usize, setting: Setting, value: f64) -> Result<(), TorchError> {
        let group = self.group(group)?;
        self.check(setting)?;
        Ok(self.raw.set(group, setting, value)?)
    }

    /// All groups take the value or, since they have one algorithm, none.
    fn set_all(&mut self, setting: Setting, value: f64) -> Result<(), TorchError> {
        self.check(setting)?;
        (0..self.groups.len()).try_for_each(|group| Ok(self.raw.set(group, setting, value)?))
    }

    fn check(&self, setting: Setting) -> Result<(), ShimError> {
        match self.algorithm {
            Algorithm::Adam(_) | Algorithm::AdamW(_) if setting == Setting::Momentum => {
                let name = self.algorithm.name();
                Err(ShimError::refused(format!("{name} has no momentum: it has betas, which stay as they were")))
            }
            _ => Ok(()),
        }
    }
}

/// The state of one parameter after some steps.
#[derive(Debug)]
pub(crate) struct ParamState {
    /// How many steps; 0 for SGD, which does not count them.
    pub(crate) step: u64,
    /// By the names that they have in LibTorch.
    pub(crate) tensors: Vec<(&'static str, Tensor)>,
}

/// For checkpoints.
impl Optimizer {
    pub(crate) fn algorithm_name(&self) -> &'static str {
        self.algorithm.name()
    }

    /// What it trains, in order; a variable with two names has the first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(|parameter| parameter.name.as_str())
    }

    /// The tensor that it trains under that name.
    pub(crate) fn tensor(&self, name: &str) -> Option<&Tensor> {
        let at = self.parameter(name).ok()?;
        Some(&self.parameters[at].tensor)
    }

    /// The names that tensors of a state can have.
    pub(crate) fn state_names(&self) -> &[&'static str] {
        self.raw.slots()
    }

    fn parameter(&self, name: &str) -> Result<usize, ShimError> {
        self.parameters
            .binary_search_by(|parameter| parameter.name.as_str().cmp(name))
            .map_err(|_| ShimError::refused(format!("the optimizer has no parameter `{name}`")))
    }

    /// The state of a parameter, nothing before its first step. The tensors share the optimizer's storage: a later step
    /// writes to them.
    pub(crate) fn state(&self, name: &str) -> Result<Option<ParamState>, ShimError> {
        let state = self.raw.state(self.parameter(name)?)?;
        Ok(state.map(|(step, tensors)| ParamState { step, tensors }))
    }

    /// Puts a state in, of which it takes copies, on the parameter's device; without one the parameter is as before its first
    /// step. Refuses what a step could not go on with, and has then changed nothing.
    pub(crate) fn set_state(&mut self, name: &str, state: Option<&ParamState>) -> Result<(), ShimError> {
        let parameter = self.parameter(name)?;
        match state {
            Some(state) => self.raw.set_state(parameter, state.step, &state.tensors),
            None => self.raw.drop_state(parameter),
        }
    }

    /// The learning rates of all groups, in ascending order of their numbers.
    pub(crate) fn lrs(&self) -> Vec<f64> {
        (0..self.groups.len()).map(|group| self.raw.lr(group).expect("a group of its own has a rate")).collect()
    }

    /// Sets them all, or, where one is refused, none.
    pub(crate) fn set_lrs(&mut self, lrs: &[f64]) -> Result<(), ShimError> {
        if lrs.len() != self.groups.len() {
            let (given, own) = (lrs.len(), self.groups.len());
            return Err(ShimError::refused(format!("{given} learning rates for an optimizer of {own} groups")));
        }
        let before = self.lrs();
        let set = |raw: &mut RawOptimizer, lrs: &[f64]| {
            lrs.iter().enumerate().try_for_each(|(group, lr)| raw.set(group, Setting::Lr, *lr))
        };
        set(&mut self.raw, lrs).inspect_err(|_| {
            // These were there.
            let _ = set(&mut self.raw, &before);
        })
    }
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Optimizer");
        debug.field("algorithm", &self.algorithm).field("parameters", &self.parameters.len());
        debug.field("groups", &self.groups).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "optim_tests.rs"]
mod tests;
