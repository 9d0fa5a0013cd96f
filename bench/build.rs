//! Lets the benchmark find its native library when it runs: link arguments of a library never reach the binaries that use it.
fn main() {
    let lib = std::env::var("DEP_REPLAY_RUNTIME_LIBTORCH_LIB").expect("replay-runtime passes on where LibTorch is");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
}
