//! What is sent between processes: parameters before a window, gradients after it; at most one of each ahead of, or behind, the
//! block that runs.

use std::cell::RefCell;

use tch::Tensor;

use super::spare::Spare;
use super::{Param, Sharded};
use crate::dist::{DistError, Operation, WORDS};
use crate::ffi::Works;

/// A unit's parameters on their way.
struct Gather {
    unit: usize,
    wholes: Vec<Tensor>,
    /// None in a world of one.
    works: Option<Works>,
}

/// A unit's gradients on their way.
struct Exchange {
    unit: usize,
    /// Of the parameters that have one, by number, and what all ranks send of it.
    received: Vec<(usize, Tensor)>,
    works: Option<Works>,
}

/// What is on its way while a block runs.
#[derive(Default)]
pub(super) struct Transfers {
    overlap: bool,
    ahead: RefCell<Option<Gather>>,
    behind: RefCell<Option<Exchange>>,
    pub(super) spare: Spare,
}

impl Transfers {
    pub(super) fn new(overlap: bool) -> Self {
        Self { overlap, ..Self::default() }
    }

    /// What arrives is of no use any more.
    pub(super) fn forget(&self) {
        self.ahead.take();
        self.behind.take();
        self.spare.clear();
    }
}

impl Sharded<'_> {
    /// The whole parameters of a unit. Collective, unless they are on their way.
    pub(super) fn gather(&self, unit: usize) -> Result<Vec<Tensor>, DistError> {
        let ahead = self.transfers.ahead.borrow_mut().take_if(|gather| gather.unit == unit);
        let gather = ahead.map_or_else(|| self.begin_gather(unit), Ok)?;
        self.wait(gather.works, Operation::Gather, unit)?;
        Ok(gather.wholes)
    }

    /// The unit will be the next one: its parameters set out, unless others are on their way.
    pub(super) fn begin_ahead(&self, unit: usize) -> Result<(), DistError> {
        let Transfers { overlap, ahead, .. } = &self.transfers;
        if *overlap && ahead.borrow().is_none() && self.units[unit].open.get() == 0 {
            let gather = self.begin_gather(unit)?;
            *ahead.borrow_mut() = Some(gather);
        }
        Ok(())
    }

    fn begin_gather(&self, unit: usize) -> Result<Gather, DistError> {
        let bytes = self.params_of(unit).map(Param::gather_bytes).sum();
        if !self.units[unit].params.is_empty() {
            self.dist.enter(Operation::Gather, Self::number(unit), bytes, [0; WORDS])?;
        }
        let wholes: Vec<_> = self
            .params_of(unit)
            .map(|param| param.room(param.mixed.param, param.places.payload, &self.transfers.spare))
            .collect();
        let works = self.dist.group().map(|group| group.gather_pieces(&wholes)).transpose();
        let works = works.map_err(|error| self.dist.lost(Operation::Gather, Self::number(unit), error))?;
        Ok(Gather { unit, wholes, works })
    }

    /// Adds gradients up over all ranks, now or while the next block runs. Collective.
    pub(super) fn exchange(&self, unit: usize, grads: Vec<Option<Tensor>>) -> Result<(), DistError> {
        self.settle_exchange()?;
        let exchange = self.begin_exchange(unit, grads)?;
        *self.transfers.behind.borrow_mut() = Some(exchange);
        if self.transfers.overlap { Ok(()) } else { self.settle_exchange() }
    }

    fn begin_exchange(&self, unit: usize, grads: Vec<Option<Tensor>>) -> Result<Exchange, DistError> {
        let any = self.agree_on_grads(unit, &grads)?;
        let used = self.units[unit].params.iter().zip(grads).zip(any).filter(|(_, any)| *any);
        let (numbers, pieces): (Vec<_>, Vec<_>) =
            used.map(|((&number, grad), _)| (number, self.params[number].pieces_of(grad))).unzip();
        let Some(group) = self.dist.group() else {
            return Ok(Exchange { unit, received: numbers.into_iter().zip(pieces).collect(), works: None });
        };
        let spare = &self.transfers.spare;
        let received: Vec<_> =
            pieces.iter().map(|pieces| spare.take(pieces.size()[0], pieces.kind(), pieces.device())).collect();
        let works = group.exchange_pieces(&received, &pieces);
        let works = works.map_err(|error| self.dist.lost(Operation::Reduce, Self::number(unit), error))?;
        Ok(Exchange { unit, received: numbers.into_iter().zip(received).collect(), works: Some(works) })
    }

    /// The gradients that are on their way have arrived, and are added to what there is.
    pub(super) fn settle_exchange(&self) -> Result<(), DistError> {
        let Some(Exchange { unit, received, works }) = self.transfers.behind.take() else { return Ok(()) };
        self.wait(works, Operation::Reduce, unit)?;
        for (number, received) in &received {
            self.params[*number].add_mean(received);
        }
        if self.dist.world() > 1 {
            self.transfers.spare.give(received.into_iter().map(|(_, received)| received));
        }
        Ok(())
    }

    /// What LibTorch gives up ends the group.
    fn wait(&self, works: Option<Works>, operation: Operation, unit: usize) -> Result<(), DistError> {
        let done = works.map_or(Ok(()), Works::wait);
        done.map_err(|error| self.dist.lost(operation, Self::number(unit), error))
    }

    /// Which parameters of a unit have a gradient on any rank.
    fn agree_on_grads(&self, unit: usize, grads: &[Option<Tensor>]) -> Result<Vec<bool>, DistError> {
        let mut any = vec![false; grads.len()];
        let bits = 8 * WORDS;
        // As many records as it takes for all of them; one, nearly always.
        for (first, part) in grads.chunks(bits).enumerate().map(|(i, part)| (i * bits, part)) {
            let mut words = [0; WORDS];
            for (i, _) in part.iter().enumerate().filter(|(_, grad)| grad.is_some()) {
                words[i / 8] |= 1 << (i % 8);
            }
            let bytes = self.params_of(unit).map(Param::reduce_bytes).sum();
            for record in self.dist.enter(Operation::Reduce, Self::number(unit), bytes, words)? {
                for (i, any) in any[first..first + part.len()].iter_mut().enumerate() {
                    *any |= record.words[i / 8] & (1 << (i % 8)) != 0;
                }
            }
        }
        Ok(any)
    }
}
