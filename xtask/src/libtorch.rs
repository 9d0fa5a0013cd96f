//! Finds the one `LibTorch` that tch works with, or fetches it, and points the link `.libtorch` at it.
//!
//! Cargo's configuration sets `LIBTORCH` to that link, so every later cargo command finds `LibTorch` with no variable
//! set, and always by the same path: torch-sys is compiled again whenever the path changes.

mod fetch;
mod folder;
mod link;
mod python;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::environment::Environment;
use folder::Problem;

/// The one version that tch 0.26 works with.
const VERSION: &str = "2.13.0";

/// What the libraries must be able to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// CPU alone; libraries with CUDA serve as well.
    Cpu,
    /// CUDA: every library that `libtorch_cuda.so` needs is there.
    Cuda,
}

impl From<bool> for Flavour {
    fn from(cuda: bool) -> Self {
        if cuda { Self::Cuda } else { Self::Cpu }
    }
}

/// Where a `LibTorch` was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Variable,
    Python,
    Link,
    System,
    Cache,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Variable => "set by LIBTORCH",
            Self::Python => "the PyTorch of python3",
            Self::Link => "already linked",
            Self::System => "installed system-wide",
            Self::Cache => "from the cache",
        })
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Found {
    folder: PathBuf,
    origin: Origin,
}

/// Makes sure that cargo finds a `LibTorch` through the link, and a C++ compiler; gives the folder linked to.
pub(crate) fn ensure(env: &Environment, flavour: Flavour) -> Result<PathBuf> {
    env.check_compiler()?;
    check_parts(env)?;
    let found = match find(env, flavour)? {
        Some(found) => found,
        None => Found { folder: fetch::fetch(env, flavour)?, origin: Origin::Cache },
    };
    let folder = found.folder.canonicalize().with_context(|| format!("{} is gone", found.folder.display()))?;
    eprintln!("LibTorch {VERSION}: {} ({})", folder.display(), found.origin);
    link::point(env, &folder)?;
    Ok(folder)
}

/// The first of: what the user asks for, what is linked, what the system has, what was fetched before.
///
/// What the user asks for must fit, or it is an error. A link that fits stays, so that a folder named once by
/// `LIBTORCH` keeps serving after the variable is gone.
fn find(env: &Environment, flavour: Flavour) -> Result<Option<Found>> {
    if let Some(folder) = &env.libtorch {
        demand(env, folder, flavour, "LIBTORCH is set to")?;
        return Ok(Some(Found { folder: folder.clone(), origin: Origin::Variable }));
    }
    if env.use_pytorch {
        let folder = python::torch_folder(env)?;
        demand(env, &folder, flavour, "LIBTORCH_USE_PYTORCH is set and python3 has its PyTorch in")?;
        return Ok(Some(Found { folder, origin: Origin::Python }));
    }
    let link = env.link();
    if folder::check(&link, &env.without_parts(), flavour).is_ok() {
        return Ok(Some(Found { folder: link, origin: Origin::Link }));
    }
    if env.system.join("lib").join(folder::library("torch")).exists() {
        match folder::check(&env.system, env, flavour) {
            Ok(()) => return Ok(Some(Found { folder: env.system.clone(), origin: Origin::System })),
            // Nobody asked for this one, so it is no reason to stop.
            Err(problem) => eprintln!("passing over the LibTorch in {}: {problem}", env.system.display()),
        }
    }
    Ok(fetch::cached(env, flavour).map(|folder| Found { folder, origin: Origin::Cache }))
}

/// Checks the two variables that replace parts of whatever is found: torch-sys obeys them without a look.
fn check_parts(env: &Environment) -> Result<()> {
    let library = Path::new("lib").join(folder::library("torch_cpu"));
    let header = PathBuf::from("include/ATen/ATen.h");
    for (name, part, file) in [("LIBTORCH_LIB", &env.lib, library), ("LIBTORCH_INCLUDE", &env.include, header)] {
        if let Some(path) = part.as_ref().map(|part| part.join(file)).filter(|path| !path.exists()) {
            bail!("{name} is set, but {} is missing\n       correct the variable or unset it", path.display());
        }
    }
    Ok(())
}

/// Checks a folder that the user chose.
fn demand(env: &Environment, folder: &Path, flavour: Flavour, chosen: &str) -> Result<()> {
    let Err(problem) = folder::check(folder, env, flavour) else { return Ok(()) };
    let (wanted, command) = match flavour {
        Flavour::Cpu => (format!("LibTorch {VERSION}"), "cargo xtask libtorch"),
        Flavour::Cuda => (format!("LibTorch {VERSION} and all its CUDA libraries"), "cargo xtask libtorch --cuda"),
    };
    let nearby = match problem {
        Problem::NoLibrary(_) => folder::nearby(folder, env, flavour),
        _ => None,
    };
    let advice = match nearby {
        Some(nearby) => format!("set LIBTORCH to {}, where {wanted} is", nearby.display()),
        None => format!(
            "set LIBTORCH to a folder with {wanted} (its `lib` and `include` in it), or unset the variable and run \
             `{command}`, which finds or fetches one"
        ),
    };
    bail!("{chosen} {}, but {problem}\n       {advice}", folder.display())
}

#[cfg(test)]
mod tests;
