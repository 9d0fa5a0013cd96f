//! The order of the finding, and what is said of folders that do not serve.

use std::fs;

use super::*;

/// A machine of its own: a workspace, a cache and a system prefix, all empty.
struct Machine {
    _folder: tempfile::TempDir,
    base: PathBuf,
    env: Environment,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().canonicalize().unwrap();
        for name in ["repo", "cache", "usr"] {
            fs::create_dir(base.join(name)).unwrap();
        }
        let env = Environment {
            root: base.join("repo"),
            cache: Some(base.join("cache")),
            system: base.join("usr"),
            ..Environment::default()
        };
        Self { _folder: folder, base, env }
    }

    /// Lays out what a check looks at.
    fn place(&self, path: &str, version: &str) -> PathBuf {
        let folder = self.base.join(path);
        fs::create_dir_all(folder.join("lib")).unwrap();
        fs::create_dir_all(folder.join("include/ATen")).unwrap();
        fs::write(folder.join("include/ATen/ATen.h"), "").unwrap();
        fs::write(folder.join("lib").join(folder::library("torch_cpu")), "").unwrap();
        fs::write(folder.join("lib").join(folder::library("torch")), "").unwrap();
        fs::write(folder.join("build-version"), version).unwrap();
        folder
    }

    fn origin(&self) -> Option<Origin> {
        find(&self.env, Flavour::Cpu).unwrap().map(|found| found.origin)
    }

    fn error(&self) -> String {
        find(&self.env, Flavour::Cpu).unwrap_err().to_string()
    }
}

#[test]
fn an_empty_machine_has_none() {
    assert_eq!(Machine::new().origin(), None);
}

#[test]
fn each_earlier_place_wins() {
    let mut machine = Machine::new();
    machine.place("cache/libtorch-2.13.0-cpu/torch", VERSION);
    assert_eq!(machine.origin(), Some(Origin::Cache));
    machine.place("usr", VERSION);
    assert_eq!(machine.origin(), Some(Origin::System));
    // What a link leads to is looked at, so a folder stands in for one.
    machine.place("repo/.libtorch", VERSION);
    assert_eq!(machine.origin(), Some(Origin::Link));
    machine.env.libtorch = Some(machine.place("mine", VERSION));
    assert_eq!(machine.origin(), Some(Origin::Variable));
}

#[test]
fn a_half_fetched_one_is_not_found() {
    let machine = Machine::new();
    machine.place("cache/libtorch-2.13.0-cpu.7.tmp/torch", VERSION);
    fs::create_dir_all(machine.base.join("cache/libtorch-2.13.0-cpu/torch/lib")).unwrap();
    fs::write(machine.base.join("cache/lock"), "").unwrap();
    assert_eq!(machine.origin(), None);
}

#[test]
fn an_unasked_one_of_another_version_is_passed_over() {
    let machine = Machine::new();
    machine.place("usr", "2.6.0");
    machine.place("repo/.libtorch", "2.11.0");
    assert_eq!(machine.origin(), None);
    machine.place("cache/libtorch-2.13.0-cpu/torch", "2.13.0+cu130");
    assert_eq!(machine.origin(), Some(Origin::Cache));
}

#[test]
fn a_chosen_folder_without_libtorch_is_an_error() {
    let mut machine = Machine::new();
    machine.place("cache/libtorch-2.13.0-cpu/torch", VERSION);
    machine.env.libtorch = Some("/no/such".into());
    let error = machine.error();
    assert!(error.contains("LIBTORCH is set to /no/such, but that holds no LibTorch"), "{error}");
    assert!(error.contains("unset the variable"), "{error}");
}

#[test]
fn a_chosen_folder_of_another_version_is_an_error() {
    let mut machine = Machine::new();
    machine.env.libtorch = Some(machine.place("mine", "2.11.0+cpu"));
    assert!(machine.error().contains("that is LibTorch 2.11.0, and tch 0.26 needs 2.13.0"), "{}", machine.error());
}

#[test]
fn a_folder_next_to_the_right_one_gets_a_hint() {
    let mut machine = Machine::new();
    let right = machine.place("site-packages/torch", VERSION);
    for near in [right.parent().unwrap().to_path_buf(), right.join("lib")] {
        machine.env.libtorch = Some(near);
        let expected = format!("set LIBTORCH to {}", right.display());
        assert!(machine.error().contains(&expected), "{}", machine.error());
    }
}

#[test]
fn headers_and_libraries_may_lie_elsewhere() {
    let mut machine = Machine::new();
    let mine = machine.place("mine", VERSION);
    fs::remove_dir_all(mine.join("include")).unwrap();
    machine.env.libtorch = Some(mine);
    assert!(machine.error().contains("C++ headers are missing"), "{}", machine.error());
    machine.env.include = Some(machine.place("headers", VERSION));
    assert_eq!(machine.origin(), Some(Origin::Variable));
    machine.env.lib = Some("/no/such".into());
    let error = check_parts(&machine.env).unwrap_err().to_string();
    assert!(error.contains("LIBTORCH_LIB is set, but /no/such/lib"), "{error}");
}

#[test]
fn parts_from_elsewhere_do_not_condemn_the_cache() {
    let mut machine = Machine::new();
    machine.place("cache/libtorch-2.13.0-cpu/torch", VERSION);
    machine.env.lib = Some("/no/such".into());
    assert_eq!(machine.origin(), Some(Origin::Cache));
}

#[test]
fn cuda_wants_its_libraries() {
    let machine = Machine::new();
    let cpu = machine.place("cache/libtorch-2.13.0-cpu/torch", VERSION);
    fs::write(cpu.join("lib").join(folder::library("torch_cuda")), "").unwrap();
    assert_eq!(find(&machine.env, Flavour::Cuda).unwrap(), None);
    let full = machine.place("cache/libtorch-2.13.0-cuda/torch", VERSION);
    assert_eq!(find(&machine.env, Flavour::Cuda).unwrap(), None);
    fs::write(full.join("lib").join(folder::library("torch_cuda")), "").unwrap();
    assert_eq!(find(&machine.env, Flavour::Cuda).unwrap().unwrap().folder, full);
}

#[test]
fn pytorch_without_python_is_an_error() {
    let mut machine = Machine::new();
    machine.env.use_pytorch = true;
    assert!(machine.error().contains("there is no `python3` on the PATH"), "{}", machine.error());
}
