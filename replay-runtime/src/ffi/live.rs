//! Counting the bytes of LibTorch's CPU tensors; `cpp/live.h`.

use super::{ShimError, check, sys};

/// Counts all CPU tensors that are made from now on; `false` where other threads run, which may be making some.
pub(crate) fn count_live_bytes() -> Result<bool, ShimError> {
    // Linux says which threads there are, those that LibTorch started included.
    let alone = std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if alone {
        // SAFETY: LibTorch's table of allocators may be written while no other thread reads it, and there is none: this
        // one, which alone could start one, is here. Blocks made before know how they are freed.
        check(unsafe { sys::replay_live_install() })?;
    }
    Ok(alone)
}

/// Bytes of the counted tensors that live now.
pub(crate) fn live_bytes() -> u64 {
    // SAFETY: reads an atomic counter.
    unsafe { sys::replay_live_bytes() }
}

/// The most that lived at once since the last [`reset_live_peak`].
pub(crate) fn live_peak() -> u64 {
    // SAFETY: reads an atomic counter.
    unsafe { sys::replay_live_peak() }
}

/// Lets the peak start again from what lives now.
pub(crate) fn reset_live_peak() {
    // SAFETY: writes an atomic counter.
    unsafe { sys::replay_live_reset_peak() }
}
