//! What the benchmark reads of LibTorch. Not part of the public interface: it changes without notice.
//!
//! It is compiled in always, since a feature would make two builds of this crate, and does nothing unless it is called.

use crate::ffi;
use crate::torch_error::TorchError;

/// Counts the bytes of all CPU tensors that are made from now on. To be called first thing in a program: the answer is
/// `false`, and nothing is counted, once the process has other threads.
///
/// # Errors
/// If LibTorch has an allocator that cannot be counted.
pub fn count_live_bytes() -> Result<bool, TorchError> {
    ffi::count_live_bytes().map_err(TorchError::from)
}

/// Bytes of the counted tensors that live now, as they were asked for: without the allocator's rounding.
#[must_use]
pub fn live_bytes() -> u64 {
    ffi::live_bytes()
}

/// The most that lived at once since the last [`reset_live_peak`].
#[must_use]
pub fn live_peak() -> u64 {
    ffi::live_peak()
}

/// Lets the peak start again from what lives now.
pub fn reset_live_peak() {
    ffi::reset_live_peak();
}

/// The version of the LibTorch in this process, as "2.13.0"; empty where it does not say.
#[must_use]
pub fn libtorch_version() -> String {
    ffi::library_version().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_counted_while_another_thread_runs() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || stopped.recv());
        assert!(!count_live_bytes().expect("LibTorch answers"));
        let _tensor = tch::Tensor::zeros([1000], (tch::Kind::Float, tch::Device::Cpu));
        assert_eq!((live_bytes(), live_peak()), (0, 0));
        drop(stop);
        assert!(other.join().expect("the other thread ends").is_err());
    }
}
