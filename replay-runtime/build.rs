//! Compiles the C++ shim against the libraries that torch-sys found, and passes on where these are, so that a
//! dependent's build script can set the rpath of its binaries.

use std::path::{Path, PathBuf};

/// In `cpp/`; each has a header of its name.
const SOURCES: [&str; 13] = [
    "engine",
    "grad",
    "group",
    "live",
    "node",
    "optim",
    "print",
    "recorded_graph",
    "rng",
    "saved",
    "state",
    "tape",
    "walk",
];
/// Headers alone.
const HEADERS: [&str; 3] = ["guard", "hooks", "pass"];
/// What stands for Gloo's own headers, which LibTorch does not ship.
const GLOO: &str = "cpp/gloo";

fn main() {
    let sources = SOURCES.map(|name| format!("cpp/{name}.cpp"));
    let headers = SOURCES.iter().chain(&HEADERS).map(|name| format!("cpp/{name}.h"));
    for file in sources.iter().cloned().chain(headers) {
        println!("cargo::rerun-if-changed={file}");
    }
    println!("cargo::rerun-if-changed={GLOO}");
    // torch-sys compiles nothing and says nothing under `doc-only`.
    if std::env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").expect(
        "torch-sys did not say where LibTorch is; it does so on Linux and macOS only, and not under its `doc-only` feature",
    );
    println!("cargo::metadata=libtorch_lib={lib}");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");

    let include = include_dir(Path::new(&lib));
    let mut build = cc::Build::new();
    // As system headers, so that only warnings about our own code are shown. The compiler knows its own folder, and
    // named a second time it would find its standard library no more.
    if include != Path::new("/usr/include") {
        build.flag(format!("-isystem{}", include.display()));
    }
    if std::env::var_os("CARGO_FEATURE_NCCL").is_some() {
        build.define("REPLAY_NCCL", None);
        for include in nccl_includes() {
            build.flag(format!("-isystem{}", include.display()));
        }
    }
    build
        .cpp(true)
        .std("c++17")
        .files(&sources)
        .include(GLOO)
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // Unoptimised, the shim would show up in every block's cost.
        .opt_level(2)
        .compile("replay_shim");
}

/// The headers lie beside the libraries, unless `LIBTORCH_INCLUDE` says otherwise (torch-sys honours it too).
fn include_dir(lib: &Path) -> PathBuf {
    println!("cargo::rerun-if-env-changed=LIBTORCH_INCLUDE");
    match std::env::var_os("LIBTORCH_INCLUDE") {
        Some(root) => Path::new(&root).join("include"),
        None => lib.with_file_name("include"),
    }
}

/// Where the headers of NCCL and of CUDA are.
fn nccl_includes() -> Vec<PathBuf> {
    let homes = ["NCCL_HOME", "CUDA_HOME"].map(|home| {
        println!("cargo::rerun-if-env-changed={home}");
        std::env::var_os(home).map(PathBuf::from)
    });
    let known = [Some(PathBuf::from("/usr/local/cuda")), Some(PathBuf::from("/usr"))];
    let includes: Vec<_> = homes.into_iter().chain(known).flatten().map(|home| home.join("include")).collect();
    let found = ["nccl.h", "cuda_runtime_api.h"].map(|header| {
        let folder = includes.iter().find(|folder| folder.join(header).is_file());
        folder.unwrap_or_else(|| {
            panic!("the feature `nccl` needs {header}: set NCCL_HOME and CUDA_HOME to folders whose `include` has it")
        })
    });
    // The compiler knows its own.
    found.into_iter().filter(|folder| *folder != Path::new("/usr/include")).cloned().collect()
}
