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
    /// The whole parameters of a unit. Collective, unless they are on their way or there are none.
    pub(super) fn gather(&self, unit: usize) -> Result<Vec<Tensor>, DistError> {
        let ahead = self.transfers.ahead.borrow_mut().take_if(|gather| gather.unit == unit);
        let gather =
            ahead.map_or_else(|| self.announce(unit).and_then(|wholes| self.begin_gather(unit, wholes)), Ok)?;
        self.wait(gather.works, Operation::Gather, unit)?;
        Ok(gather.wholes)
    }

    /// The unit will be the next one: its parameters set out, unless others are on their way. Ranks may differ in what they expect,
    /// by which tensors they keep alive: then nothing sets out.
    pub(super) fn begin_ahead(&self, unit: Option<usize>) -> Result<(), DistError> {
        let Transfers { overlap, ahead, .. } = &self.transfers;
        if !*overlap || ahead.borrow().is_some() {
            return Ok(());
        }
        let unit = unit.filter(|unit| self.units[*unit].open.get() == 0);
        let mut words = [0; WORDS];
        words[..4].copy_from_slice(&unit.and_then(Self::number).map_or(0, |unit| unit + 1).to_le_bytes());
        let wholes = unit.map(|unit| self.rooms(unit));
        let records = self.dist.enter(Operation::Prefetch, None, 0, words)?;
        if let Some((unit, wholes)) = unit.zip(wholes)
            && records.iter().all(|record| record.words == words)
        {
            let gather = self.begin_gather(unit, wholes)?;
            *ahead.borrow_mut() = Some(gather);
        }
        Ok(())
    }

    /// Memory is taken before the others rely on this rank.
    fn rooms(&self, unit: usize) -> Vec<Tensor> {
        let room = |param: &Param| param.room(param.mixed.param, param.places.payload, &self.transfers.spare);
        self.params_of(unit).map(room).collect()
    }

    /// All ranks are about to gather the unit.
    fn announce(&self, unit: usize) -> Result<Vec<Tensor>, DistError> {
        let (wholes, bytes) = (self.rooms(unit), self.params_of(unit).map(Param::gather_bytes).sum());
        if !self.units[unit].params.is_empty() {
            self.dist.enter(Operation::Gather, Self::number(unit), bytes, [0; WORDS])?;
        }
        Ok(wholes)
    }

    fn begin_gather(&self, unit: usize, wholes: Vec<Tensor>) -> Result<Gather, DistError> {
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
        // What can fail here alone comes before the others rely on this rank.
        let own = self.params_of(unit).zip(grads).map(|(param, grad)| grad.map(|grad| param.pieces_of(&grad)));
        let own: Vec<_> = own.collect();
        let any = self.agree_on_grads(unit, &own)?;
        let used = self.units[unit].params.iter().zip(own).zip(any).filter(|(_, any)| *any);
        let pieces = |number: usize, own: Option<Tensor>| own.unwrap_or_else(|| self.params[number].no_pieces());
        let (numbers, pieces): (Vec<_>, Vec<_>) = used.map(|((&number, own), _)| (number, pieces(number, own))).unzip();
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
        for (number, received) in received {
            self.params[number].add_mean(&received);
            // In a world of one it is the gradient, which is gone now.
            if self.dist.world() > 1 {
                self.transfers.spare.give([received]);
            }
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
