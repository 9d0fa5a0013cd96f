//! The user's Python: finds its `PyTorch`, and runs its pip.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::VERSION;
use crate::environment::Environment;

/// Finds the folder without importing it: an import takes seconds, and fails where CUDA's libraries are incomplete.
const FIND_TORCH: &str = "\
import importlib.util
spec = importlib.util.find_spec('torch')
print(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else '')
";

/// The folder of the `PyTorch` that `python3` imports.
pub(super) fn torch_folder(env: &Environment) -> Result<PathBuf> {
    let Some(python) = interpreter(env) else {
        bail!(
            "LIBTORCH_USE_PYTORCH is set, but there is no `python3` on the PATH\n       install Python 3 with PyTorch \
             {VERSION}, or unset the variable"
        );
    };
    let output = Command::new(&python).args(["-c", FIND_TORCH]).output();
    let output = output.with_context(|| format!("{} cannot be started", python.display()))?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if folder.is_empty() {
        bail!(
            "LIBTORCH_USE_PYTORCH is set, but {} has no PyTorch\n       install PyTorch {VERSION} for it, or unset the \
             variable",
            python.display()
        );
    }
    Ok(folder.into())
}

/// `pip` of that Python, ready for its arguments.
pub(super) fn pip(env: &Environment) -> Result<Command> {
    let way_round = format!(
        "\n       or put LibTorch {VERSION} on this machine by other means and set LIBTORCH to its folder (the one with \
         `lib` and `include`)"
    );
    let Some(python) = interpreter(env) else {
        bail!(
            "LibTorch {VERSION} is not on this machine, and fetching it takes Python's pip, but there is no `python3` on \
             the PATH\n       install Python 3 with pip and run this again{way_round}"
        );
    };
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "--disable-pip-version-check"]);
    // Settings of the user's that pip cannot combine with a target folder, or that want an environment there is no
    // need of.
    pip.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0");
    // A warning about system packages, none of which a target folder touches.
    pip.env("PIP_ROOT_USER_ACTION", "ignore");
    // Standard output belongs to the command that this fetch serves.
    pip.stdout(std::io::stderr());
    let mut probe = Command::new(&python);
    let probe = probe.args(["-m", "pip", "--version"]).env("PIP_REQUIRE_VIRTUALENV", "0");
    let works = probe.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        bail!(
            "LibTorch {VERSION} is not on this machine, and fetching it takes pip, which {} does not have\n       install \
             pip for that Python and run this again{way_round}",
            python.display()
        );
    }
    Ok(pip)
}

fn interpreter(env: &Environment) -> Option<PathBuf> {
    ["python3", "python"].into_iter().find_map(|name| env.program(name))
}
