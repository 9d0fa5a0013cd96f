//! One step applied many times, of whose states only a few are stored.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use crate::block::Call;
use crate::context::NoContext;
use crate::error::ReplayError;
use crate::link::{Link, Piece};
use crate::options::BlockOptions;
use crate::output::{BoxError, ReplayOutput};
use crate::rollout::{Rollout, check_version};
use crate::state::Label;

/// What [`Rollout::chain`] needs to know: the step's name, how often it is applied, and what it may keep.
#[derive(Clone, Debug)]
#[must_use]
pub struct Chain<'t> {
    options: BlockOptions,
    steps: usize,
    slots: Option<usize>,
    constants: Vec<(String, &'t Tensor)>,
}

impl<'t> Chain<'t> {
    /// A chain of `steps` steps, each of which is a block of that name or with those options.
    pub fn new(step: impl Into<BlockOptions>, steps: usize) -> Self {
        Self { options: step.into(), steps, slots: None, constants: Vec::new() }
    }

    /// Stores the states before at most `slots` steps at a time, those before the first one included, and beside them the
    /// states that are worked on. Default: those before every step.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = Some(slots);
        self
    }

    /// A tensor that every step reads and that no step replaces, such as a table of actions. It is saved once. The body
    /// gets it behind the states; constants come in the order in which they were added.
    pub fn constant(mut self, name: impl Into<String>, tensor: &'t Tensor) -> Self {
        self.constants.push((name.into(), tensor));
        self
    }

    fn check(&self) -> Result<(), ReplayError> {
        let block = || self.options.name().to_owned();
        if self.steps == 0 {
            return Err(ReplayError::NoStep { block: block() });
        }
        if self.slots == Some(0) {
            return Err(ReplayError::NoSlot { block: block() });
        }
        Ok(())
    }
}

impl<'m> Rollout<'m> {
    /// Applies one step many times where not even the inputs of all steps fit: with [`Chain::slots`], the states before only
    /// so many steps are stored at a time, and `backward` computes the others again from the nearest stored ones, in the
    /// order that needs the fewest runs (the binomial schedule of Griewank and Walther, "Revolve", 2000).
    ///
    /// `states` are the tensors that go from step to step, by name. `body` gets the number of the step, from 0 and of tch's type for indices, and as one
    /// list the states and the [constants](Chain::constant); its outputs are the states of the next step, in the same order.
    /// Those of the last step come out. A loss of each step is therefore a state to which the step adds.
    ///
    /// ```no_run
    /// # use replay_runtime::{Chain, ReplayError, Rollout};
    /// # use tch::{Device, Kind, Tensor, nn, nn::Module};
    /// # fn main() -> Result<(), ReplayError> {
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// # let cell = nn::linear(vs.root(), 72, 64, Default::default());
    /// # let start = Tensor::zeros([256, 64], (Kind::Float, Device::Cpu));
    /// # let actions = Tensor::zeros([1000, 256, 8], (Kind::Float, Device::Cpu));
    /// let zero = Tensor::from(0f32);
    /// let rollout = Rollout::new(&vs);
    /// let chain = Chain::new("step", 1000).slots(16).constant("actions", &actions);
    /// let (_, loss) = rollout.chain(chain, &[("state", &start), ("loss", &zero)], |_, i, inputs| {
    ///     let [state, loss, actions] = inputs else { unreachable!("two states and a constant") };
    ///     let state = cell.forward(&Tensor::cat(&[state, &actions.get(i)], 1)).tanh();
    ///     let loss = loss + state.square().mean(Kind::Float);
    ///     (state, loss)
    /// })?;
    /// rollout.backward(&loss)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Each step is a block, with all that holds for blocks: `body` may draw random numbers, run under autocast, update
    /// buffers where its options say so, and must do the same each time it runs.
    ///
    /// # Cost
    ///
    /// Let `r` be the least number with `C(slots + r, slots) >= steps`, where `C(n, k)` is the binomial coefficient. The forward
    /// runs `steps` bodies, `backward` runs `steps` more as replays, and before them, as *advances* without a gradient,
    ///
    /// ```text
    /// r steps - C(slots + r, r - 1) - (steps - 1)
    /// ```
    ///
    /// bodies: none if there are as many slots as steps; for 1000 steps 1861 with 16 slots and 6999 with 4. (The theory counts the
    /// forward's first `steps - 1` runs as advances, and that of the last step not at all if its graph is kept.)
    ///
    /// Memory does not grow with `steps`, but for about 3 KB per step; 5 KB more where steps draw random numbers, the
    /// buffers that a step updates, and all outputs with [`Check::Values`](crate::Check::Values) or `serialize_rng(false)`.
    /// A step that returns states none of which requires grad begins anew: what lies before it takes no slots.
    ///
    /// # Errors
    /// [`ReplayError::NoStep`] and [`ReplayError::NoSlot`] for a chain without steps or with 0 slots,
    /// [`ReplayError::States`] if the body returns another number of tensors than it got as states; otherwise as for
    /// [`block`](Self::block). Where a step fails in the forward, generators and buffers are as the steps before
    /// it left them.
    ///
    /// # Panics
    /// As for [`block`](Self::block).
    pub fn chain<R, F>(&self, chain: Chain<'_>, states: &[(&str, &Tensor)], body: F) -> Result<R::Value, ReplayError>
    where
        R: ReplayOutput,
        F: Fn(&Rollout<'m>, i64, &[Tensor]) -> R + 'm,
    {
        check_version()?;
        chain.check()?;
        let Chain { options, steps, slots, constants } = chain;
        let expected = states.len();
        let names = states.iter().map(|(name, _)| (*name).to_owned());
        let label = Rc::new(Label::new(options, names.chain(constants.iter().map(|(name, _)| name.clone()))));
        let body = Rc::new(body);
        let slots = slots.filter(|&slots| slots < steps);
        let mut piece: Option<(usize, Rc<Piece>)> = None;

        let mut states: Vec<_> = states.iter().map(|(_, state)| state.shallow_clone()).collect();
        for step in 0..steps {
            // Without an entry for the step before, no gradient goes from here to there.
            piece = piece.filter(|(start, piece)| piece.has(step - 1 - start));
            let piece = slots.map(|slots| {
                &*piece.get_or_insert_with(|| {
                    (step, Rc::new(Piece::new(Arc::clone(&label.block), steps - step, slots, expected)))
                })
            });
            let link = piece.map(|(start, piece)| Link { piece: Rc::clone(piece), step: step - start });
            let inputs: Vec<_> = states.iter().chain(constants.iter().map(|(_, tensor)| *tensor)).map(Some).collect();
            let (number, body) = (i64::try_from(step).unwrap_or(i64::MAX), Rc::clone(&body));
            let call = Call {
                state: self.state(),
                label: Rc::clone(&label),
                inputs: &inputs,
                context: Rc::new(NoContext),
                link,
                body: Rc::new(move |state, leaves| {
                    let leaves: Vec<_> = leaves.iter().flatten().map(Tensor::shallow_clone).collect();
                    let outputs = body(&Rollout::nested(state), number, &leaves).into_tensors()?;
                    if outputs.len() == expected { Ok(outputs) } else { Err(WrongCount(outputs.len()).into()) }
                }),
            };
            states = call.run().map_err(|error| wrong_count(error, step, expected))?;
        }
        Ok(R::from_tensors(states))
    }
}

/// A step returned so many tensors.
#[derive(Debug)]
struct WrongCount(usize);

impl fmt::Display for WrongCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it returned another number of states: {}", self.0)
    }
}

impl std::error::Error for WrongCount {}

fn wrong_count(error: ReplayError, step: usize, expected: usize) -> ReplayError {
    let found = |source: &BoxError| source.downcast_ref::<WrongCount>().map(|count| count.0);
    match error {
        ReplayError::Block { block, pass, source } => match found(&source) {
            Some(found) => ReplayError::States { block, step, expected, found },
            None => ReplayError::Block { block, pass, source },
        },
        other => other,
    }
}
