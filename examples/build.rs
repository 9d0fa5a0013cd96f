//! Lets the examples find LibTorch when they run: link arguments of a library never reach the binaries that use it.
fn main() {
    if let Ok(lib) = std::env::var("DEP_REPLAY_RUNTIME_LIBTORCH_LIB") {
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}"); }
}
