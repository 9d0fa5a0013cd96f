//! The norm of gradients of which each process has a piece.

use tch::{Kind, Tensor};

use super::{Param, Sharded, torch};
use crate::dist::DistError;
use crate::ffi;

impl Sharded<'_> {
    /// Scales all gradients so that their 2-norm, over all parameters of all processes, is `max_norm` at most, and returns what it
    /// was. What is [ignored](crate::ShardedBuilder::ignore) has no part in it. As `torch.nn.utils.clip_grad_norm_`: the factor
    /// is `max_norm / (norm + 1e-6)`, and 1 at most. Collective.
    ///
    /// tch's own `Optimizer::clip_grad_norm` knows only this process's pieces.
    ///
    /// # Errors
    /// See [`DistError`].
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64, DistError> {
        let norm = self.grad_norm()?;
        let factor = max_norm / (norm + 1e-6);
        // A norm that is no number makes all gradients none, on all processes alike.
        if factor < 1.0 || factor.is_nan() {
            for grad in self.grads()? {
                let _ = tch::no_grad(|| grad.shallow_clone().g_mul_scalar_(factor));
            }
        }
        Ok(norm)
    }

    /// The 2-norm of all gradients. Collective.
    ///
    /// # Errors
    /// See [`DistError`].
    pub fn grad_norm(&self) -> Result<f64, DistError> {
        let squares = self
            .grads()?
            .iter()
            .map(|grad| grad.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]))
            .fold(0.0, |sum: f64, square: f64| sum + square);
        // In rank order, so that all ranks have the same bits.
        Ok(self.dist.all_gather(squares)?.iter().fold(0.0, |sum, square| sum + square).sqrt())
    }

    fn grads(&self) -> Result<Vec<Tensor>, DistError> {
        let grad = |param: &Param| ffi::grad(&param.tensor).transpose();
        let grads = self.params.iter().filter_map(grad).collect::<Result<_, _>>();
        grads.map_err(torch("read the gradients"))
    }
}
