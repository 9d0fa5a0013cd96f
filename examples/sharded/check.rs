//! The same training in one process, with nothing cut.

use std::error::Error;

use replay_runtime::Rollout;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use super::model::{Decoder, batch};
use super::{Options, bits, mean, seed};

/// Whether it comes to the same losses and, as far as rank 0 has them, to the same parameters, bit for bit. The mean of the
/// ranks' gradients is the sum divided by their number, so that holds for 1, 2, 4, .. ranks, by which nothing is rounded.
pub(crate) fn is_equal(
    sharded: &nn::VarStore,
    losses: &[f64],
    options: &Options,
    world: usize,
) -> Result<bool, Box<dyn Error>> {
    let size = options.size();
    tch::manual_seed(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let decoder = Decoder::new(&vs.root(), size);
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let mut equal = true;
    for (step, expected) in losses.iter().enumerate() {
        let batches: Vec<_> = (0..world).map(|rank| batch(size, options.batch, seed(step, rank, world))).collect();
        let rollout = Rollout::new(&vs);
        let losses = decoder.losses(&rollout, &Tensor::stack(&batches, 0))?;
        let total = Tensor::stack(&losses, 0).sum(Kind::Float) / world as f64;
        rollout.backward(&total)?;
        optimizer.step();
        optimizer.zero_grad();
        let losses = losses.iter().map(f64::try_from).collect::<Result<Vec<_>, _>>()?;
        equal &= mean(&losses).to_bits() == expected.to_bits();
    }
    let whole = vs.variables();
    for (name, piece) in sharded.variables() {
        let first = whole[&name].reshape(-1).narrow(0, 0, i64::try_from(piece.numel())?);
        equal &= bits(&first) == bits(&piece);
    }
    Ok(equal)
}
