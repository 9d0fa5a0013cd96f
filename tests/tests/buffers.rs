//! Guarantee *buffers*: a block that says so may update non-trainable variables; they are updated once, by the forward,
//! and each replay starts from the values that its forward found. A block that does not say so is an error.
//!
//! Gradients are compared with plain autograd: each weight is used once inside each block and nowhere else. Statistics
//! are compared with those that plain calls leave.

mod buffers {
    mod clock;
    mod large;
    mod others;
    mod recorded;
    mod statistics;
}
