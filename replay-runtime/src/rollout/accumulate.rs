//! The choice of the kind in which gradients are added up.

use tch::{Kind, Tensor};

use super::{Rollout, RolloutBuilder};
use crate::error::ReplayError;

impl RolloutBuilder<'_> {
    /// Adds gradients up in `kind`, [`Kind::Float`] or [`Kind::Double`], where parameters are of a narrower kind.
    /// Default: in each parameter's own.
    ///
    /// A sum in bf16 loses each addend below 2^-8 of it, one in f16 below 2^-11, so that in a long rollout the blocks
    /// at its beginning no longer count. With this choice LibTorch casts each contribution to a leaf's gradient before
    /// the first addition, inside blocks and around them. What travels between blocks keeps its kind, and so does what
    /// a block adds up for an input of its own before it hands the sum over.
    ///
    /// `.grad` then **is** of that kind, and stays so, as with `grad_dtype` in PyTorch: later rollouts and plain
    /// autograd add to it without loss, and tch's optimizers take it. What was `None` and received nothing stays
    /// `None`. An old gradient of a narrower kind is widened, and the handle that `grad()` gave before keeps the old
    /// values. A failure puts all of them back as they were, unless
    /// [`restore_gradients(false)`](Self::restore_gradients) was chosen.
    ///
    /// It costs the memory of the kind (in f32, gradients take twice the room of parameters in bf16, and one
    /// contribution more while it is added), and the time of the casts: 1.4 times that of a backward pass in bf16 that
    /// is bound by the traffic of gradients, nothing to speak of in one that is bound by computing.
    ///
    /// Under autocast parameters are f32 already, and their gradients are added up in f32 without this choice.
    ///
    /// While [`backward`](Rollout::backward) runs, no other thread may differentiate the same variables: another
    /// rollout with this choice gets [`ReplayError::VariableShared`], also with `restore_gradients(false)`; plain
    /// autograd may fail, or leave a gradient of either kind.
    ///
    /// ```no_run
    /// # use replay_runtime::{ReplayError, Rollout};
    /// # use tch::{Kind, Tensor, nn};
    /// # fn step(vs: &nn::VarStore, loss: impl FnOnce(&Rollout<'_>) -> Tensor) -> Result<(), ReplayError> {
    /// let rollout = Rollout::builder(vs).accumulate_in(Kind::Float).build(); // of a store after `vs.bfloat16()`
    /// # let loss = loss(&rollout);
    /// rollout.backward(&loss)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Panics
    /// If `kind` is neither Float nor Double. A trainable leaf whose gradient it cannot hold (f64 in Float, a complex
    /// one) is an error of `backward`, before anything is touched: [`ReplayError::AccumulateKind`].
    pub fn accumulate_in(mut self, kind: Kind) -> Self {
        assert!(
            matches!(kind, Kind::Float | Kind::Double),
            "gradients are added up in Float or Double, not in {kind:?}"
        );
        self.options.accumulate = Some(kind);
        self
    }
}

impl Rollout<'_> {
    /// Whether the chosen kind holds the gradients of all `leaves`.
    pub(super) fn check_kinds(&self, leaves: &[Tensor]) -> Result<(), ReplayError> {
        let Some(kind) = self.state.options.accumulate else { return Ok(()) };
        let holds = |leaf: Kind| match leaf {
            Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble => false,
            Kind::Double => kind == Kind::Double,
            _ => true,
        };
        let Some(leaf) = leaves.iter().find(|leaf| leaf.requires_grad() && !holds(leaf.kind())) else { return Ok(()) };
        let name = self.state.name_of(leaf);
        let variable = name.unwrap_or_else(|| format!("leaf of shape {:?}", leaf.size()));
        Err(ReplayError::AccumulateKind { variable, found: leaf.kind(), kind })
    }
}
