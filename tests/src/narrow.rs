//! A weight of a narrow kind, in a chain of blocks and around it.

use replay_runtime::Rollout;
use tch::{Device, Kind, Tensor, nn};

use crate::randn;

/// A weight of `kind`, in a store.
pub fn store(kind: Kind) -> (nn::VarStore, Tensor) {
    tch::set_num_threads(1);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().var_copy("w", &(randn(3, &[6, 6], Kind::Float) * 0.4));
    vs.set_kind(kind);
    (vs, w)
}

/// One block, which uses the weight once.
pub fn step(x: &Tensor, w: &Tensor) -> Tensor {
    (x.matmul(w) + x).tanh()
}

/// What stands behind the blocks, and uses the weight too.
pub fn tail(h: &Tensor, w: &Tensor) -> Tensor {
    (h * w.get(0)).to_kind(Kind::Float).square().sum(Kind::Float)
}

/// What the first block is given.
pub fn start(kind: Kind) -> Tensor {
    randn(1, &[5, 6], Kind::Float).to_kind(kind)
}

/// How many blocks [`chain`] has.
pub const BLOCKS: usize = 12;

/// [`step`], [`BLOCKS`] times, and [`tail`].
///
/// # Panics
/// If a block fails.
pub fn chain<'m>(rollout: &Rollout<'m>, w: &'m Tensor) -> Tensor {
    let mut h = start(w.kind());
    for _ in 0..BLOCKS {
        h = rollout.block("step", &[("h", &h)], move |_, i| step(&i[0], w)).unwrap();
    }
    tail(&h, w)
}

/// The gradients of `root` with respect to `handles`.
#[must_use]
pub fn grads(root: &Tensor, handles: &[&Tensor]) -> Vec<Tensor> {
    Tensor::run_backward(&[root], handles, false, false)
}

/// Gives `w` a gradient of `kind`, by plain autograd or by a rollout.
///
/// # Panics
/// If the rollout fails, or `w` has a gradient of another kind.
pub fn start_grad(w: &Tensor, kind: Kind, restore: bool) -> Tensor {
    let vs = nn::VarStore::new(Device::Cpu);
    let loss = (w * 100.0).to_kind(Kind::Float).sum(Kind::Float);
    if kind == w.kind() {
        loss.backward();
    } else {
        Rollout::builder(&vs).accumulate_in(kind).restore_gradients(restore).build().backward(&loss).unwrap();
    }
    assert_eq!(w.grad().kind(), kind);
    w.grad()
}
