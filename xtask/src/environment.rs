//! What the commands know of the machine and the user's settings, read once.
//!
//! The logic takes this struct and never asks the process, so tests can describe any machine.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// The name of the link in the root of the workspace.
const LINK: &str = ".libtorch";

/// The settings that decide where `LibTorch` comes from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// The root of the workspace.
    pub(crate) root: PathBuf,
    /// `LIBTORCH`, where the user has set it: the default of `.cargo/config.toml` counts as unset.
    pub(crate) libtorch: Option<PathBuf>,
    /// `LIBTORCH_INCLUDE`: the folder whose `include/` is used instead of `LibTorch`'s own.
    pub(crate) include: Option<PathBuf>,
    /// `LIBTORCH_LIB`: the folder whose `lib/` is used instead of `LibTorch`'s own.
    pub(crate) lib: Option<PathBuf>,
    /// `LIBTORCH_USE_PYTORCH` is set, to whatever value: this is how torch-sys reads it.
    pub(crate) use_pytorch: bool,
    /// Where fetched files are kept, outside the checkout: a second clone fetches nothing.
    pub(crate) cache: Option<PathBuf>,
    /// The prefix that a system-wide `LibTorch` would be in.
    pub(crate) system: PathBuf,
    /// `PATH`.
    pub(crate) path: OsString,
    /// `CXX`.
    pub(crate) cxx: Option<OsString>,
    /// The cargo that runs this command.
    pub(crate) cargo: OsString,
}

impl Environment {
    /// The environment of this process.
    pub(crate) fn from_process() -> Result<Self> {
        let cwd = std::env::current_dir().context("the current folder cannot be read")?;
        Self::from_variables(&cwd, std::env::home_dir(), |name| std::env::var_os(name))
    }

    fn from_variables(cwd: &Path, home: Option<PathBuf>, get: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        // A variable set to nothing is not set.
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let folder = |name: &str| get(name).map(|value| cwd.join(value));
        // cargo tells a moved checkout its new place; the built-in one serves a program started by hand.
        let manifest = get("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let Some(root) = manifest.parent().map(Path::to_path_buf) else {
            bail!("{} has no parent folder to be the workspace", manifest.display());
        };
        // The XDG rules: a relative path is to be ignored.
        let xdg = get("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let user_cache = xdg.or_else(|| home.map(|home| home.join(".cache")));
        Ok(Self {
            libtorch: folder("LIBTORCH").filter(|path| !is_link_of(path, &root)),
            include: folder("LIBTORCH_INCLUDE"),
            lib: folder("LIBTORCH_LIB"),
            use_pytorch: get("LIBTORCH_USE_PYTORCH").is_some(),
            cache: folder("REPLAY_CACHE").or_else(|| user_cache.map(|cache| cache.join("replay-blocks"))),
            system: PathBuf::from("/usr"),
            path: get("PATH").unwrap_or_default(),
            cxx: get("CXX"),
            cargo: get("CARGO").unwrap_or_else(|| "cargo".into()),
            root,
        })
    }

    /// The git-ignored link that cargo's configuration names as `LIBTORCH`.
    pub(crate) fn link(&self) -> PathBuf {
        self.root.join(LINK)
    }

    /// The same without `LIBTORCH_INCLUDE` and `LIBTORCH_LIB`: a fetched folder must be whole without their help.
    pub(crate) fn without_parts(&self) -> Self {
        Self { include: None, lib: None, ..self.clone() }
    }

    /// The program of that name, or at that path, if it can be started.
    pub(crate) fn program(&self, name: impl AsRef<OsStr>) -> Option<PathBuf> {
        let name = Path::new(name.as_ref());
        if name.components().count() > 1 {
            return is_program(name).then(|| name.to_path_buf());
        }
        std::env::split_paths(&self.path).map(|folder| folder.join(name)).find(|path| is_program(path))
    }

    /// Checks that the C++ compiler that build scripts will call is there.
    pub(crate) fn check_compiler(&self) -> Result<()> {
        let install = "install one (g++ or clang, usually in the system's compiler or build-tools package)";
        if let Some(cxx) = &self.cxx {
            // `CXX` may hold a wrapper and flags: `ccache g++`.
            let words = cxx.to_string_lossy();
            let first = words.split_whitespace().next().unwrap_or_default();
            if self.program(cxx).is_some() || self.program(first).is_some() {
                return Ok(());
            }
            bail!("CXX is set to `{words}`, which is no program here: unset it, or {install}");
        }
        // Build scripts look for `c++` alone.
        if self.program("c++").is_some() {
            return Ok(());
        }
        match ["g++", "clang++"].into_iter().find(|name| self.program(name).is_some()) {
            Some(other) => bail!("no `c++` on the PATH, but `{other}` is: set CXX={other}"),
            None => bail!("no C++ compiler on the PATH: {install}, or set CXX to one"),
        }
    }
}

/// Whether that is the link itself, by whatever way to the root.
fn is_link_of(path: &Path, root: &Path) -> bool {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return false };
    let same = || folder.canonicalize().is_ok_and(|folder| root.canonicalize().is_ok_and(|root| folder == root));
    name == LINK && (folder == root || same())
}

#[cfg(unix)]
fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(not(unix))]
fn is_program(path: &Path) -> bool {
    path.is_file() || path.with_extension("exe").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Environment {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        Environment::from_variables(Path::new("/here"), Some("/home/u".into()), find).unwrap()
    }

    #[test]
    fn the_default_of_the_cargo_configuration_counts_as_unset() {
        let env = from(&[("CARGO_MANIFEST_DIR", "/repo/xtask"), ("LIBTORCH", "/repo/.libtorch")]);
        assert_eq!(env.libtorch, None);
        let env = from(&[("CARGO_MANIFEST_DIR", "/repo/xtask"), ("LIBTORCH", "/opt/libtorch")]);
        assert_eq!(env.libtorch, Some("/opt/libtorch".into()));
    }

    #[test]
    fn an_empty_variable_counts_as_unset() {
        let env = from(&[("LIBTORCH", ""), ("LIBTORCH_USE_PYTORCH", "")]);
        assert_eq!((env.libtorch, env.use_pytorch), (None, false));
    }

    #[test]
    fn a_relative_folder_is_that_of_the_caller() {
        assert_eq!(from(&[("LIBTORCH", "mine")]).libtorch, Some("/here/mine".into()));
    }

    #[test]
    fn the_cache_is_outside_the_checkout() {
        let cache = |variables| from(variables).cache.unwrap();
        assert_eq!(cache(&[]), Path::new("/home/u/.cache/replay-blocks"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/xdg")]), Path::new("/xdg/replay-blocks"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "xdg")]), Path::new("/home/u/.cache/replay-blocks"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/xdg"), ("REPLAY_CACHE", "/mine")]), Path::new("/mine"));
    }

    #[test]
    fn a_missing_compiler_is_named() {
        let error = from(&[("PATH", "/nowhere")]).check_compiler().unwrap_err().to_string();
        assert!(error.contains("no C++ compiler on the PATH"), "{error}");
        let error = from(&[("PATH", "/nowhere"), ("CXX", "/no/such -O2")]).check_compiler().unwrap_err().to_string();
        assert!(error.contains("CXX is set to `/no/such -O2`"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_compiler_that_build_scripts_would_miss_is_pointed_out() {
        use std::os::unix::fs::PermissionsExt as _;
        let bin = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let path = bin.path().join(name);
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let path = bin.path().to_str().unwrap();
        place("clang++");
        let error = from(&[("PATH", path)]).check_compiler().unwrap_err().to_string();
        assert!(error.contains("set CXX=clang++"), "{error}");
        from(&[("PATH", path), ("CXX", "clang++ -O2")]).check_compiler().unwrap();
        place("c++");
        from(&[("PATH", path)]).check_compiler().unwrap();
    }
}
