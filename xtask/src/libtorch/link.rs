//! The git-ignored link `.libtorch` in the root of the workspace.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::folder::library;
use crate::cargo;
use crate::environment::Environment;

/// Points the link at the folder, which is canonical. A link that leads there already is not touched.
pub(super) fn point(env: &Environment, folder: &Path) -> Result<()> {
    let link = env.link();
    let before = link.canonicalize().ok();
    if before.as_deref() == Some(folder) {
        return Ok(());
    }
    let existed = match link.symlink_metadata() {
        Ok(entry) if !entry.is_symlink() => {
            bail!("{} is in the way of the link to LibTorch: move it elsewhere", link.display())
        }
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| format!("{} cannot be read", link.display())),
    };
    // Made aside and renamed: a cargo that reads the link meanwhile sees the old one or the new one.
    let fresh = env.root.join(format!(".libtorch.{}.tmp", std::process::id()));
    symlink(folder, &fresh).with_context(|| format!("the link {} cannot be made", fresh.display()))?;
    fs::rename(&fresh, &link).with_context(|| format!("the link {} cannot be replaced", link.display()))?;
    if existed && has_cuda(before.as_deref()) != has_cuda(Some(folder)) {
        forget_build(env)?;
    }
    Ok(())
}

/// Whether the folder has the CUDA library; none for a folder that is gone.
fn has_cuda(folder: Option<&Path>) -> Option<bool> {
    folder.map(|folder| folder.join("lib").join(library("torch_cuda")).exists())
}

/// torch-sys decides when it is built whether to link to CUDA, and cannot see that the link leads elsewhere.
fn forget_build(env: &Environment) -> Result<()> {
    eprintln!("the libraries behind the link `.libtorch` are others now: torch-sys will be compiled again");
    cargo::check(cargo::command(env).args(["clean", "--quiet", "--locked", "--package", "torch-sys"]))
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::Error::new(ErrorKind::Unsupported, "no links here: set LIBTORCH yourself and call cargo directly"))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn the_link_is_made_replaced_and_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let env = Environment { root: root.clone(), ..Environment::default() };
        let (one, two) = (root.join("one"), root.join("two"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        let inode = || env.link().symlink_metadata().unwrap().ino();

        point(&env, &one).unwrap();
        assert_eq!(env.link().canonicalize().unwrap(), one);
        let first = inode();
        point(&env, &one).unwrap();
        assert_eq!(inode(), first);
        point(&env, &two).unwrap();
        assert_eq!(env.link().canonicalize().unwrap(), two);
    }

    #[test]
    fn a_folder_in_the_way_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let env = Environment { root: root.path().to_path_buf(), ..Environment::default() };
        fs::create_dir(env.link()).unwrap();
        let error = point(&env, Path::new("/elsewhere")).unwrap_err().to_string();
        assert!(error.contains("is in the way of the link"), "{error}");
    }
}
