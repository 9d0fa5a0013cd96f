//! Which states of a chain to store, so that as few steps as possible run again: the binomial schedule.
//!
//! A. Griewank and A. Walther, "Algorithm 799: Revolve", ACM Transactions on Mathematical Software 26 (2000), 19-45. A
//! chain of `len` steps is differentiated from its last step to its first, each from its input. The first input is
//! stored, and with it at most `slots` inputs at a time, beside the one that is being worked on. An *advance* runs a step
//! to get from its input to the next. With `C(n, k)` the binomial coefficient and `r` the least number with
//! `C(slots + r, slots) >= len`, the least number of advances in all, those of the forward included, is
//!
//! ```text
//! t(len, slots) = r len - C(slots + r, r - 1)
//! ```
//!
//! It is reached by storing the input that lies as many steps ahead as [`split`] says, differentiating the steps behind it
//! with one slot less, and then those before it with all slots again.

/// Advances over the steps `from..to`, after which the input of step `to` is to be stored or worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leg {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) stored: bool,
}

/// The positions of the inputs that are stored.
#[derive(Debug)]
pub(crate) struct Slots {
    len: usize,
    capacity: usize,
    /// Ascending.
    taken: Vec<usize>,
    /// The next position that the forward stores. It is found on the way, so that a chain that ends early, of however many
    /// steps, costs what it ran.
    next: usize,
}

impl Slots {
    /// Those of a chain of `len` steps on its way forward, before its first step.
    ///
    /// # Panics
    /// Without a slot or a step.
    pub(crate) fn new(len: usize, capacity: usize) -> Self {
        assert!(capacity > 0, "the first input takes a slot");
        assert!(len > 0, "there is a first step");
        let mut slots = Self { len, capacity, taken: vec![0], next: 0 };
        slots.next = slots.leg(len - 1).to;
        slots
    }

    /// Whether the forward, which asks step by step, stores the input of `step`. The last one's is worked on at once.
    pub(crate) fn stores(&mut self, step: usize) -> bool {
        if step == self.next && step + 1 < self.len {
            self.taken.push(step);
            self.next = self.leg(self.len - 1).to;
        }
        self.holds(step)
    }

    fn holds(&self, step: usize) -> bool {
        self.taken.binary_search(&step).is_ok()
    }

    /// How to come to the input of `step`, the last one that is not differentiated yet, from the nearest stored one: no
    /// leg if it is stored itself. Slots behind it are free again, and the legs' are taken.
    pub(crate) fn legs(&mut self, step: usize) -> Vec<Leg> {
        self.free_from(step + 1);
        let mut legs = Vec::new();
        loop {
            let leg = self.leg(step);
            if leg.from == step {
                return legs;
            }
            legs.push(leg);
            if !leg.stored {
                return legs;
            }
            self.taken.push(leg.to);
        }
    }

    /// The first leg from the last stored input to that of `step`.
    fn leg(&self, step: usize) -> Leg {
        let from = *self.taken.last().expect("the first input is stored to the end");
        let free = self.capacity - self.taken.len();
        let to = if free == 0 || from == step { step } else { from + split(step + 1 - from, free + 1) };
        // The input of `step` is worked on at once.
        Leg { from, to, stored: to < step }
    }

    /// The inputs of `step` and of those behind it are needed no more.
    pub(crate) fn free_from(&mut self, step: usize) {
        self.taken.retain(|&taken| taken < step);
    }
}

/// How many steps to advance from a stored input before the next one is stored, for a piece of `len` steps that begins
/// there and `slots` that include its own, both at least 2: from 1 to `len - 1`.
fn split(len: usize, slots: usize) -> usize {
    let mut r = 1;
    while binomial(slots + r, slots) < len {
        r += 1;
    }
    // Each step before the split is advanced over once more than if it stood alone. That is optimal where the steps before
    // it are at most as many as `slots` can serve in `r - 1` advances each, and those behind it are at least as many as one
    // slot less can serve in `r - 1`. Of the splits that are both, any does.
    let before = binomial(slots + r - 1, slots);
    let behind = binomial(slots + r - 2, slots - 1);
    before.min(len - behind)
}

/// `C(n, k)`, or `usize::MAX` where it is larger.
fn binomial(n: usize, k: usize) -> usize {
    let mut value: u128 = 1;
    for i in 0..k.min(n - k) {
        // Whole numbers throughout, and growing: this is `C(n, i + 1)`.
        value = value * (n - i) as u128 / (i + 1) as u128;
        if value > usize::MAX as u128 {
            return usize::MAX;
        }
    }
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
