//! Whether the LibTorch in this process is the one that the library was compiled for.

use std::sync::OnceLock;

use crate::error::ReplayError;
use crate::ffi;

const EXPECTED_VERSION: &str = "2.13";

/// The shim was compiled against one version's classes; another one's are laid out differently.
pub(crate) fn check_version() -> Result<(), ReplayError> {
    static FOUND: OnceLock<String> = OnceLock::new();
    let found = FOUND.get_or_init(|| ffi::library_version().unwrap_or_default());
    // A LibTorch that does not say is taken at its word: its headers were checked when the shim was compiled.
    if found.is_empty() || found.starts_with(EXPECTED_VERSION) {
        return Ok(());
    }
    Err(ReplayError::Version { found: found.clone(), expected: EXPECTED_VERSION })
}
