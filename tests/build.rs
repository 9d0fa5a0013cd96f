//! Sets the rpath, as every crate with binaries must, and a `cfg` for each thing that some tests need and not every machine has:
//! `cuda`, a GPU; `namespaces`, networks of our own making; `torchrun`, a Python that imports torch.

use std::path::Path;
use std::process::{Command, Stdio};

fn main() {
    let lib = std::env::var("DEP_REPLAY_RUNTIME_LIBTORCH_LIB").expect("replay-runtime says where LibTorch is");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");

    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=REPLAY_PYTHON");
    println!("cargo::rustc-check-cfg=cfg(cuda, namespaces, torchrun)");
    if Path::new("/dev/nvidia0").exists() && Path::new(&lib).join("libtorch_cuda.so").exists() {
        println!("cargo::rustc-cfg=cuda");
    }
    // In a network and a mount namespace that end with the command: nothing of it stays.
    let make = "mount -t tmpfs none /run && ip netns add other && ip link add one type veth peer name two netns other";
    if succeeds(Command::new("unshare").args(["--net", "--mount", "sh", "-c", make])) {
        println!("cargo::rustc-cfg=namespaces");
    }
    let python = std::env::var_os("REPLAY_PYTHON").filter(|python| !python.is_empty());
    if python.is_some_and(|python| succeeds(Command::new(python).args(["-c", "import torch.distributed.run"]))) {
        println!("cargo::rustc-cfg=torchrun");
    }
}

fn succeeds(command: &mut Command) -> bool {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
