//! One parameter, cut into as many pieces as there are ranks.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use super::spare::Spare;
use crate::dist::Dist;
use crate::ffi::{self, ShimError};

/// A parameter of which this process holds one piece, in the order of its elements: rank `r` of `w` has elements
/// `r * chunk .. (r + 1) * chunk` with `chunk = ceil(n / w)`, the last ones fewer or none. The tensor that the model holds is
/// the piece, a vector, and while it is gathered the whole.
pub(super) struct Param {
    pub(super) name: String,
    /// The store's own: what is done to it, the model's layers and the optimizer see.
    pub(super) tensor: Tensor,
    /// That of the store which was cut.
    pub(super) group: usize,
    pub(super) shape: Vec<i64>,
    pub(super) kind: Kind,
    /// In which blocks compute with it, and in which its gradient is sent.
    pub(super) mixed: Mixed,
    pub(super) places: Places,
    pub(super) numel: i64,
    pub(super) chunk: i64,
    /// This rank's elements, and zeros up to `chunk`.
    piece: Tensor,
    /// How many of them are elements.
    pub(super) own: i64,
    rank: i64,
    world: i64,
    /// This rank's piece of the gradient so far, in this rollout.
    sum: RefCell<Option<Tensor>>,
    /// Where the last one was.
    last: RefCell<Option<Tensor>>,
}

/// Kinds of a parameter on its ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mixed {
    pub(super) param: Kind,
    pub(super) reduce: Kind,
}

/// Where a parameter is while it is whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// Where blocks compute with it.
    pub(super) compute: Device,
    /// Where pieces of it and of its gradient are sent and received.
    pub(super) payload: Device,
}

fn chunk_of(numel: i64, world: i64) -> i64 {
    numel.unsigned_abs().div_ceil(world.unsigned_abs()).cast_signed()
}

/// The elements of a rank, as the first and how many, in a world of so many.
pub(super) fn cut(numel: i64, rank: i64, world: i64) -> (i64, i64) {
    let chunk = chunk_of(numel, world);
    let first = (rank * chunk).min(numel);
    (first, chunk.min(numel - first))
}

impl Param {
    /// Cuts the tensor, whose values are the same on all ranks.
    pub(super) fn new(
        name: String,
        tensor: Tensor,
        group: usize,
        mixed: Option<Mixed>,
        places: Places,
        dist: &Dist,
    ) -> Self {
        let count = |ranks: usize| i64::try_from(ranks).expect("processes are few");
        let (rank, world) = (count(dist.rank()), count(dist.world()));
        let (shape, kind) = (tensor.size(), tensor.kind());
        let mixed = mixed.unwrap_or(Mixed { param: kind, reduce: kind });
        let numel = shape.iter().product::<i64>();
        let chunk = chunk_of(numel, world);
        let (first, own) = cut(numel, rank, world);
        let piece = tch::no_grad(|| {
            // A copy of what nobody else has a piece of would only make holes in memory.
            if own == chunk && own == numel && tensor.is_contiguous() {
                return tensor.detach().view(-1);
            }
            let piece = Tensor::zeros([chunk], (kind, tensor.device()));
            piece.narrow(0, 0, own).copy_(&tensor.detach().reshape(-1).narrow(0, first, own));
            piece
        });
        let param = Self {
            name,
            tensor,
            group,
            shape,
            kind,
            mixed,
            places,
            numel,
            chunk,
            piece,
            own,
            rank,
            world,
            sum: RefCell::default(),
            last: RefCell::default(),
        };
        param.shard();
        param
    }

    /// Bytes of the whole, and of its gradient.
    pub(super) fn bytes(&self) -> u64 {
        self.numel.unsigned_abs() * size_of(self.mixed.param)
    }

    /// Bytes of the piece.
    pub(super) fn piece_bytes(&self) -> u64 {
        self.chunk.unsigned_abs() * size_of(self.kind)
    }

    /// Bytes that every rank sends to each other one when it is gathered.
    pub(super) fn gather_bytes(&self) -> u64 {
        self.chunk.unsigned_abs() * size_of(self.mixed.param)
    }

    /// And when its gradient is reduced.
    pub(super) fn reduce_bytes(&self) -> u64 {
        self.chunk.unsigned_abs() * size_of(self.mixed.reduce)
    }

    /// Where this rank's elements begin.
    pub(super) fn first(&self) -> i64 {
        cut(self.numel, self.rank, self.world).0
    }

    /// This rank's elements, which the model's tensor is while it is not whole.
    pub(super) fn own_piece(&self) -> Tensor {
        self.piece.narrow(0, 0, self.own)
    }

    /// The model's tensor is the piece again. What the whole took is free once no graph holds a view of it.
    pub(super) fn shard(&self) {
        tch::no_grad(|| self.tensor.shallow_clone().set_data(&self.own_piece()));
    }

    /// Whether the model's tensor is the piece still.
    pub(super) fn is_own(&self) -> bool {
        self.tensor.size() == [self.own] && (self.own == 0 || self.tensor.data_ptr() == self.piece.data_ptr())
    }

    /// Room for the whole, in which the own piece is; in a world of one the piece is the whole, if it is of that kind.
    pub(super) fn room(&self, kind: Kind, device: Device, spare: &Spare) -> Tensor {
        tch::no_grad(|| {
            if self.world == 1 {
                return self.piece.to_device(device).to_kind(kind);
            }
            let whole = spare.take(self.chunk * self.world, kind, device);
            whole.narrow(0, self.rank * self.chunk, self.chunk).copy_(&self.piece);
            whole
        })
    }

    /// The model's tensor becomes the whole.
    pub(super) fn become_whole(&self, whole: &Tensor) {
        let whole = whole.to_device(self.places.compute);
        tch::no_grad(|| self.tensor.shallow_clone().set_data(&whole.narrow(0, 0, self.numel).view(&self.shape[..])));
    }

    /// A gradient as pieces for all ranks.
    pub(super) fn pieces_of(&self, grad: &Tensor) -> Tensor {
        tch::no_grad(|| {
            let dense = if grad.is_sparse() { grad.to_dense(None::<Kind>, false) } else { grad.shallow_clone() };
            let flat = dense.reshape(-1).to_device(self.places.payload).to_kind(self.mixed.reduce);
            if self.numel == self.chunk * self.world {
                return flat;
            }
            let padded = self.no_pieces();
            padded.narrow(0, 0, self.numel).copy_(&flat);
            padded
        })
    }

    /// Those of a gradient that this rank has not.
    pub(super) fn no_pieces(&self) -> Tensor {
        Tensor::zeros([self.chunk * self.world], (self.mixed.reduce, self.places.payload))
    }

    /// Adds the mean of the pieces that all ranks have sent, summed in rank order, to what there is.
    pub(super) fn add_mean(&self, received: &Tensor) {
        tch::no_grad(|| {
            // In a world of one it is the gradient itself.
            let mut mean = received.narrow(0, 0, self.chunk).to_dtype(self.sum_kind(), false, self.world > 1);
            for rank in 1..self.world {
                mean = mean.g_add_(&received.narrow(0, rank * self.chunk, self.chunk));
            }
            if self.world > 1 {
                #[expect(clippy::cast_precision_loss, reason = "processes are few")]
                let part = 1.0 / self.world as f64;
                mean = mean.g_mul_scalar_(part);
            }
            let mean = mean.narrow(0, 0, self.own).to_device(self.piece.device());
            let mut sum = self.sum.borrow_mut();
            *sum = Some(match sum.take() {
                Some(mut sum) => sum.g_add_(&mean),
                None => self.new_sum(&mean),
            });
        });
    }

    /// A sum that begins with it: where the last one was, if nobody has that any more. Memory that lives from one step into the next
    /// would lie between what comes and goes, and leave the allocator with holes.
    fn new_sum(&self, mean: &Tensor) -> Tensor {
        match self.last.take().filter(ffi::owns_storage) {
            Some(mut last) => {
                last.copy_(mean);
                last
            }
            None => mean.copy(),
        }
    }

    /// In which gradients are added up.
    fn sum_kind(&self) -> Kind {
        if self.kind == Kind::Double { Kind::Double } else { Kind::Float }
    }

    /// What was added up becomes the piece's gradient.
    pub(super) fn flush(&self) -> Result<(), ShimError> {
        let sum = self.sum.take().map(|sum| sum.to_kind(self.kind));
        // By another tensor, so that it is seen whether the gradient is still held. One of another kind cannot be a sum.
        let last = sum.as_ref().filter(|sum| sum.kind() == self.sum_kind()).map(Tensor::detach);
        self.last.replace(last);
        ffi::set_grad(&self.tensor, sum.as_ref())
    }

    pub(super) fn forget(&self) {
        self.sum.take();
    }
}

fn size_of(kind: Kind) -> u64 {
    kind.elt_size_in_bytes() as u64
}
