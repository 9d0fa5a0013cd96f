//! How the steps of a chain find each other: the data behind it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::schedule::{Leg, Slots};

/// The steps of a chain from one whose states need no gradient to the last. Steps are numbered from its first.
pub(crate) struct Piece {
    pub(crate) block: Arc<str>,
    len: usize,
    states: usize,
    slots: RefCell<Slots>,
    /// The numbers of the steps' entries in the rollout's table, as far as the forward has come.
    entries: RefCell<Vec<u64>>,
}

impl Piece {
    /// A piece of `len` runs of `block` over so many `states`, which are stored before at most `capacity` steps at a time.
    pub(crate) fn new(block: Arc<str>, len: usize, capacity: usize, states: usize) -> Self {
        Self { block, len, states, slots: RefCell::new(Slots::new(len, capacity)), entries: RefCell::default() }
    }

    /// Whether the step was recorded.
    pub(crate) fn has(&self, step: usize) -> bool {
        step < self.entries.borrow().len()
    }

    /// The number of the step's entry.
    pub(crate) fn entry(&self, step: usize) -> u64 {
        self.entries.borrow()[step]
    }
}

/// The place of a block that is a step of a chain.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) piece: Rc<Piece>,
    pub(crate) step: usize,
}

impl Link {
    /// How many of the block's inputs, the first ones, are states.
    pub(crate) fn states(&self) -> usize {
        self.piece.states
    }

    /// Whether the forward saves the states before this step: in a slot, or, before the last step, because its replay comes
    /// first.
    pub(crate) fn keeps_states(&self) -> bool {
        self.step == 0 || self.step + 1 == self.piece.len || self.piece.slots.borrow_mut().stores(self.step)
    }

    /// The step has been recorded, as the next one of its piece, under that number.
    pub(crate) fn recorded(&self, entry: u64) {
        let mut entries = self.piece.entries.borrow_mut();
        debug_assert_eq!(entries.len(), self.step);
        entries.push(entry);
    }

    /// How to come to the states before this step.
    pub(crate) fn legs(&self) -> Vec<Leg> {
        self.piece.slots.borrow_mut().legs(self.step)
    }
}
