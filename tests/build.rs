//! The build script that a user's crate needs too: its binaries find LibTorch by rpath.
fn main() {
    let lib = std::env::var("DEP_REPLAY_RUNTIME_LIBTORCH_LIB").expect("replay-runtime says where LibTorch is");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
}
