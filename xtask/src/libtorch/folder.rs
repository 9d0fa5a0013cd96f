//! Checks whether a folder holds the `LibTorch` that tch works with.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Flavour, VERSION};
use crate::environment::Environment;

/// Why a folder does not serve.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    NoLibrary(PathBuf),
    NoInclude(PathBuf),
    NoVersion,
    Version(String),
    NoCuda(PathBuf),
    CudaIncomplete(Vec<String>),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(path) => write!(f, "that holds no LibTorch: {} is missing", path.display()),
            Self::NoInclude(path) => write!(f, "its C++ headers are missing: there is no {}", path.display()),
            Self::NoVersion => write!(f, "its version cannot be told, and tch 0.26 needs {VERSION}"),
            Self::Version(found) => write!(f, "that is LibTorch {found}, and tch 0.26 needs {VERSION}"),
            Self::NoCuda(path) => write!(f, "it is without CUDA: {} is missing", path.display()),
            Self::CudaIncomplete(missing) => {
                write!(f, "its CUDA part is incomplete, it lacks {}", missing.join(", "))
            }
        }
    }
}

/// The file name of a library on this system.
pub(super) fn library(name: &str) -> String {
    format!("{}{name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}

/// Checks the folder as torch-sys will use it: `LIBTORCH_INCLUDE` and `LIBTORCH_LIB` replace its parts.
pub(super) fn check(folder: &Path, env: &Environment, flavour: Flavour) -> Result<(), Problem> {
    let lib = env.lib.as_deref().unwrap_or(folder).join("lib");
    let include = env.include.as_deref().unwrap_or(folder).join("include");
    let cpu = lib.join(library("torch_cpu"));
    if !cpu.exists() {
        return Err(Problem::NoLibrary(cpu));
    }
    let header = include.join("ATen/ATen.h");
    if !header.exists() {
        return Err(Problem::NoInclude(header));
    }
    match version(folder, &include) {
        None => return Err(Problem::NoVersion),
        Some(found) if found != VERSION => return Err(Problem::Version(found)),
        Some(_) => {}
    }
    match flavour {
        Flavour::Cpu => Ok(()),
        Flavour::Cuda => check_cuda(&lib.join(library("torch_cuda")), env),
    }
}

/// The version without what follows a `+`: `2.13.0+cu130` and `2.13.0+cpu` are one.
fn version(folder: &Path, include: &Path) -> Option<String> {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    let full = read(folder.join("version.py"))
        .and_then(|text| version_of_python(&text))
        .or_else(|| read(folder.join("build-version")).map(|text| text.trim().to_owned()))
        .or_else(|| {
            let headers = ["torch/headeronly/version.h", "torch/version.h", "torch/csrc/api/include/torch/version.h"];
            headers.iter().find_map(|header| version_of_header(&read(include.join(header))?))
        })?;
    Some(full.split('+').next().unwrap_or_default().to_owned())
}

fn version_of_python(text: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    Some(value.trim_matches(['\'', '"', ' ']).to_owned())
}

fn version_of_header(text: &str) -> Option<String> {
    let part = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix("#define TORCH_VERSION_")?.strip_prefix(name))?;
        value.trim().parse::<u32>().ok()
    };
    Some(format!("{}.{}.{}", part("MAJOR ")?, part("MINOR ")?, part("PATCH ")?))
}

/// The light set that serves a CPU has `libtorch_cuda.so` too, but not the libraries which that one needs in turn.
fn check_cuda(cuda: &Path, env: &Environment) -> Result<(), Problem> {
    if !cuda.exists() {
        return Err(Problem::NoCuda(cuda.to_path_buf()));
    }
    // The loader itself is the judge. A system without `ldd` is believed.
    let Some(ldd) = env.program("ldd") else { return Ok(()) };
    let Ok(output) = Command::new(ldd).arg(cuda).output() else { return Ok(()) };
    let missing = missing_libraries(&String::from_utf8_lossy(&output.stdout));
    if missing.is_empty() { Ok(()) } else { Err(Problem::CudaIncomplete(missing)) }
}

/// The libraries that `ldd` did not find.
fn missing_libraries(ldd: &str) -> Vec<String> {
    let lines = ldd.lines().filter_map(|line| line.trim().strip_suffix(" => not found"));
    // The driver's own library comes with the driver, not with LibTorch.
    lines.filter(|name| !name.starts_with("libcuda.so")).map(str::to_owned).collect()
}

/// Where the user may have meant: the unpacked archive's or wheel's own folder, or the one above `lib`.
pub(super) fn nearby(folder: &Path, env: &Environment, flavour: Flavour) -> Option<PathBuf> {
    let inside = ["torch", "libtorch"].map(|name| folder.join(name));
    let candidates = inside.into_iter().chain(folder.parent().map(Path::to_path_buf));
    candidates.into_iter().find(|candidate| check(candidate, env, flavour).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_all_three_places() {
        let python = "from typing import Optional\n__all__ = ['__version__']\n__version__ = '2.13.0+cu130'\n";
        assert_eq!(version_of_python(python).as_deref(), Some("2.13.0+cu130"));
        let header = "/// Major\n#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 13\n\
                      #define TORCH_VERSION_PATCH 0\n#define TORCH_VERSION \\\n  \"2.13.0\"\n";
        assert_eq!(version_of_header(header).as_deref(), Some("2.13.0"));
        assert_eq!(version_of_header("#define OTHER 1"), None);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("build-version"), "2.13.0+cpu\n").unwrap();
        assert_eq!(version(folder.path(), folder.path()).as_deref(), Some("2.13.0"));
    }

    #[test]
    fn missing_cuda_libraries_are_listed() {
        let ldd = "\tlinux-vdso.so.1 (0x00)\n\tlibnccl.so.2 => not found\n\tlibcuda.so.1 => not found\n\
                   \tlibc.so.6 => /lib/libc.so.6 (0x00)\n\tlibcudnn.so.9 => not found\n";
        assert_eq!(missing_libraries(ldd), ["libnccl.so.2", "libcudnn.so.9"]);
        assert!(missing_libraries("").is_empty());
    }
}
