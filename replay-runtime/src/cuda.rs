//! CUDA on demand.
//!
//! A Rust program that links LibTorch does not keep `libtorch_cuda.so` among its dependencies, because the linker
//! drops libraries of which no symbol is used, and then LibTorch answers that there is no CUDA. Loading the library
//! before the first question about CUDA brings it in; after that question it is too late, since LibTorch has
//! remembered its answer. So ask here instead of `tch::Cuda`: the same binary then runs on machines with a GPU and
//! without.
//!
//! Not yet run on a GPU.

use std::sync::OnceLock;

use tch::Device;

use crate::error::ReplayError;
use crate::ffi;

const LIBRARY: &str = "libtorch_cuda.so";

/// Loads LibTorch's CUDA library, once per process.
///
/// # Errors
/// [`ReplayError::Cuda`], with what is missing: the library itself, one that it needs, or a usable GPU.
pub fn load() -> Result<(), ReplayError> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    let error = |reason: &str, remedy| Err(ReplayError::Cuda { reason: reason.to_owned(), remedy });
    let loaded = LOADED
        .get_or_init(|| ffi::load_library(LIBRARY).map_err(|error| format!("{LIBRARY} could not be loaded: {error}")));
    match loaded {
        Err(reason) => error(reason, "fetch the full set of libraries with `cargo xtask libtorch --cuda`"),
        Ok(()) if !ffi::has_cuda() => error(
            "LibTorch was asked about CUDA before its library was loaded",
            "call `replay_runtime::cuda::load()` before any `tch::Cuda` call",
        ),
        Ok(()) if !tch::Cuda::is_available() => error("no usable GPU was found", "check the driver with `nvidia-smi`"),
        Ok(()) => Ok(()),
    }
}

/// Whether CUDA can be used.
#[must_use]
pub fn is_available() -> bool {
    load().is_ok()
}

/// The first CUDA device where there is one, otherwise the CPU.
#[must_use]
pub fn device_if_available() -> Device {
    if is_available() { Device::Cuda(0) } else { Device::Cpu }
}
