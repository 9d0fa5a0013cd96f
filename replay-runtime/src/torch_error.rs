//! An error of LibTorch's own: short where a user reads it, whole behind it.

use std::error::Error;
use std::fmt;

use crate::ffi::ShimError;

/// What LibTorch reported. `Display` is its first line, `Debug` all of it with the C++ backtrace.
pub struct TorchError {
    brief: String,
    full: String,
}

impl fmt::Display for TorchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.brief.lines().next().unwrap_or("no message"))
    }
}

impl fmt::Debug for TorchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.full)
    }
}

impl Error for TorchError {}

impl From<tch::TchError> for TorchError {
    fn from(error: tch::TchError) -> Self {
        let full = error.to_string();
        Self { brief: full.clone(), full }
    }
}

impl From<ShimError> for TorchError {
    fn from(error: ShimError) -> Self {
        Self { brief: error.brief, full: error.full }
    }
}
