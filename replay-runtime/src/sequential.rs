//! A list of layers as few blocks, each of several layers.

use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;

use crate::error::ReplayError;
use crate::options::BlockOptions;
use crate::output::{BoxError, ReplayOutput};
use crate::rollout::Rollout;

impl<'m> Rollout<'m> {
    /// Runs `layers` one after the other on `input`, in as many blocks as there are `segments`: what
    /// `torch.utils.checkpoint.checkpoint_sequential` is in Python.
    ///
    /// `apply` runs one layer, so that the layers may be of any type: a `Vec` of [`tch::nn::Linear`], of
    /// `Box<dyn nn::Module>` or `Box<dyn nn::ModuleT>`, of closures, or of your own. ([`tch::nn::SequentialT`] and its
    /// kind do not give their layers away; keep these in a `Vec` instead.) It returns a `Tensor` or a `Result` of one. For tch's
    /// own layers it may just be `nn::Module::forward`.
    ///
    /// ```no_run
    /// # use replay_runtime::{ReplayError, Rollout};
    /// # use tch::{Device, Kind, Tensor, nn, nn::Module};
    /// # fn main() -> Result<(), ReplayError> {
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// let layers: Vec<nn::Linear> =
    ///     (0..24).map(|i| nn::linear(vs.root() / i, 256, 256, Default::default())).collect();
    /// let x = Tensor::ones([64, 256], (Kind::Float, Device::Cpu));
    ///
    /// let rollout = Rollout::new(&vs);
    /// let y = rollout.sequential("encoder", 5, &layers, &x, |layer, x| layer.forward(x).relu())?;
    /// rollout.backward(&y.square().mean(Kind::Float))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A segment keeps its input, and its layers' activations exist while it is replayed: with `n` layers, about `sqrt(n)`
    /// segments need the least memory. Their lengths differ by one layer at most, and they are called
    /// after their layers, `encoder[0..5]` and so on. Unlike in Python, the last segment is a block too.
    ///
    /// # Errors
    /// [`ReplayError::Segments`] if `segments` is 0 or there are more segments than layers, so also if there are no
    /// layers; otherwise as for [`block`](Self::block).
    ///
    /// # Panics
    /// As for [`block`](Self::block).
    pub fn sequential<L, R, F>(
        &self,
        name: &str,
        segments: usize,
        layers: &'m [L],
        input: &Tensor,
        apply: F,
    ) -> Result<Tensor, ReplayError>
    where
        R: ReplayOutput<Value = Tensor>,
        F: Fn(&'m L, &Tensor) -> R + 'm,
    {
        self.sequential_with(&BlockOptions::new(name), segments, layers, input, apply)
    }

    /// [`sequential`](Self::sequential) with choices, which are those of each segment: for layers that update the
    /// statistics of normalisation.
    ///
    /// # Errors
    /// As for [`sequential`](Self::sequential).
    ///
    /// # Panics
    /// As for [`block`](Self::block).
    pub fn sequential_with<L, R, F>(
        &self,
        options: &BlockOptions,
        segments: usize,
        layers: &'m [L],
        input: &Tensor,
        apply: F,
    ) -> Result<Tensor, ReplayError>
    where
        R: ReplayOutput<Value = Tensor>,
        F: Fn(&'m L, &Tensor) -> R + 'm,
    {
        if segments == 0 || segments > layers.len() {
            return Err(ReplayError::Segments { block: options.name().to_owned(), segments, layers: layers.len() });
        }
        let apply = Rc::new(apply);
        let mut state = input.shallow_clone();
        for range in ranges(layers.len(), segments) {
            let options = options.renamed(format!("{}[{}..{}]", options.name(), range.start, range.end));
            let (segment, apply) = (&layers[range], Rc::clone(&apply));
            state = self.block_with(options, &[("input", &state)], move |_, inputs| {
                segment.iter().try_fold(inputs[0].shallow_clone(), |state, layer| -> Result<Tensor, BoxError> {
                    apply(layer, &state).into_tensors().map(R::from_tensors)
                })
            })?;
        }
        Ok(state)
    }
}

/// `layers` cut into `segments` pieces of lengths as even as possible, longer ones spread among the shorter.
fn ranges(layers: usize, segments: usize) -> impl Iterator<Item = Range<usize>> {
    // Not `i * layers / segments`, which may overflow.
    let bound = move |i: usize| i * (layers / segments) + i * (layers % segments) / segments;
    (0..segments).map(move |i| bound(i)..bound(i + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_even_and_cover_the_list_in_order() {
        for layers in 1..40 {
            for segments in 1..=layers {
                let ranges: Vec<_> = ranges(layers, segments).collect();
                assert_eq!(ranges.len(), segments);
                let joined: Vec<_> = ranges.iter().cloned().flatten().collect();
                assert!(joined.into_iter().eq(0..layers), "{layers} in {segments}: {ranges:?}");
                let even =
                    |range: &Range<usize>| range.len() == layers / segments || range.len() == layers.div_ceil(segments);
                assert!(ranges.iter().all(even), "{layers} in {segments}: {ranges:?}");
            }
        }
    }
}
