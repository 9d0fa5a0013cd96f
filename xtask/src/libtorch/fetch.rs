//! Fetches `LibTorch` with pip into the cache, once for all checkouts.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::{Flavour, VERSION, folder, python};
use crate::environment::Environment;

/// What of CUDA the CPU part is linked to; everything else of it can stay away.
const NEEDED_ON_CPU: [&str; 2] = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cupti==13.0.*"];

/// A `LibTorch` that an earlier fetch has left in the cache.
///
/// Only whole ones have this name: a fetch works in a folder with another name and renames it at its end.
pub(super) fn cached(env: &Environment, flavour: Flavour) -> Option<PathBuf> {
    let cache = env.cache.as_deref()?;
    let serving: &[Flavour] = match flavour {
        Flavour::Cpu => &[Flavour::Cpu, Flavour::Cuda],
        Flavour::Cuda => &[Flavour::Cuda],
    };
    let mut folders = serving.iter().map(|&flavour| cache.join(name(flavour)).join("torch"));
    folders.find(|torch| folder::check(torch, &env.without_parts(), flavour).is_ok())
}

/// Fetches `LibTorch` into the cache; processes that want it at the same time wait for the first.
pub(super) fn fetch(env: &Environment, flavour: Flavour) -> Result<PathBuf> {
    let Some(cache) = env.cache.as_deref() else {
        bail!("there is no home folder to keep LibTorch in: set REPLAY_CACHE to a folder for it");
    };
    // Before anything is made: a machine without pip is left as it was.
    let mut pip = python::pip(env)?;
    fs::create_dir_all(cache).with_context(|| format!("the cache {} cannot be made", cache.display()))?;
    let _lock = lock(cache)?;
    if let Some(torch) = cached(env, flavour) {
        return Ok(torch);
    }
    remove_leftovers(cache, flavour)?;

    let partial = cache.join(format!("{}.{}.tmp", name(flavour), std::process::id()));
    eprintln!("fetching LibTorch {VERSION} into {} ({})", cache.display(), size(flavour));
    let fetched = run_pip(&mut pip, flavour, &partial).and_then(|()| {
        folder::check(&partial.join("torch"), &env.without_parts(), flavour)
            .map_err(|problem| anyhow::anyhow!("what pip fetched does not serve: {problem}"))
    });
    if let Err(error) = fetched {
        // Leave nothing behind; the next fetch would remove it anyway.
        let _ = fs::remove_dir_all(&partial);
        return Err(error);
    }
    let whole = cache.join(name(flavour));
    fs::rename(&partial, &whole).with_context(|| format!("{} cannot be renamed", partial.display()))?;
    Ok(whole.join("torch"))
}

/// Takes the cache's lock, which the system releases when this process ends, however it ends.
fn lock(cache: &Path) -> Result<File> {
    let path = cache.join("lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("{} cannot be opened", path.display()))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => eprintln!("waiting for another fetch into {}", cache.display()),
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| {
                format!("{} cannot be locked: set REPLAY_CACHE to a folder on a local disk", path.display())
            });
        }
    }
    file.lock().with_context(|| format!("{} cannot be locked", path.display()))?;
    Ok(file)
}

/// Removes what fetches that were cut off have left, and a folder that no longer holds what it says.
///
/// Called under the lock, so no fetch of another process is going on.
fn remove_leftovers(cache: &Path, flavour: Flavour) -> Result<()> {
    let whole = name(flavour);
    for entry in fs::read_dir(cache).with_context(|| format!("{} cannot be read", cache.display()))? {
        let path = entry?.path();
        let file_name = path.file_name().unwrap_or_default().to_string_lossy();
        let half = file_name.starts_with("libtorch-") && path.extension().is_some_and(|extension| extension == "tmp");
        if half || file_name == whole {
            fs::remove_dir_all(&path).with_context(|| format!("{} cannot be removed", path.display()))?;
        }
    }
    Ok(())
}

fn run_pip(pip: &mut Command, flavour: Flavour, target: &Path) -> Result<()> {
    pip.args(arguments(flavour)).arg("--target").arg(target);
    let status = pip.status().context("pip cannot be started")?;
    if !status.success() {
        bail!(
            "pip could not fetch LibTorch {VERSION}; its own words are above\n       check the network and the free disk \
             space, or put LibTorch {VERSION} on this machine by other means and set LIBTORCH to its folder (the one with \
             `lib` and `include`)"
        );
    }
    Ok(())
}

/// With a target folder pip needs no virtual environment, even where the system manages Python.
fn arguments(flavour: Flavour) -> Vec<String> {
    let mut arguments: Vec<String> = ["install", "--no-compile"].map(str::to_owned).into();
    if flavour == Flavour::Cpu {
        // Only the C++ part is used, so the wheel need not fit the Python that fetches it.
        arguments.extend(["--no-deps", "--only-binary=:all:", "--python-version", "3.12"].map(str::to_owned));
        if cfg!(target_os = "linux") {
            arguments.extend(NEEDED_ON_CPU.map(str::to_owned));
        }
    }
    arguments.push(format!("torch=={VERSION}"));
    arguments
}

fn name(flavour: Flavour) -> String {
    match flavour {
        Flavour::Cpu => format!("libtorch-{VERSION}-cpu"),
        Flavour::Cuda => format!("libtorch-{VERSION}-cuda"),
    }
}

fn size(flavour: Flavour) -> &'static str {
    match flavour {
        Flavour::Cpu => "540 MB to download, 1.2 GB on disk",
        Flavour::Cuda => "several gigabytes to download, more on disk",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_go_and_other_entries_stay() {
        let cache = tempfile::tempdir().unwrap();
        let make = |name: &str| fs::create_dir(cache.path().join(name)).unwrap();
        for name in ["libtorch-2.13.0-cpu.17.tmp", "libtorch-2.13.0-cpu", "libtorch-2.13.0-cuda", "other.tmp"] {
            make(name);
        }
        remove_leftovers(cache.path(), Flavour::Cpu).unwrap();
        let mut left: Vec<_> = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["libtorch-2.13.0-cuda", "other.tmp"]);
    }

    #[test]
    fn the_cpu_set_is_fetched_without_dependencies() {
        assert!(arguments(Flavour::Cpu).contains(&"--no-deps".to_owned()));
        assert!(!arguments(Flavour::Cuda).contains(&"--no-deps".to_owned()));
    }
}
