//! Sets the rpath, as every crate with binaries must, and `cfg(cuda)` where the tests that need a GPU can run.

use std::path::Path;

fn main() {
    let lib = std::env::var("DEP_REPLAY_RUNTIME_LIBTORCH_LIB").expect("replay-runtime says where LibTorch is");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");

    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(cuda)");
    if Path::new("/dev/nvidia0").exists() && Path::new(&lib).join("libtorch_cuda.so").exists() {
        println!("cargo::rustc-cfg=cuda");
    }
}
