//! Guarantee *sharded*, however the processes were started: on two hosts, and by torchrun, training has the bits of two processes
//! of one machine that meet at a file.

use std::io::Write as _;
use std::process::{Command, Output};
use std::time::Duration;

use replay_runtime::dist::{Dist, DistBuilder, report_failure};
use replay_runtime::{Optimizer, Rollout, Sharded, replay_block};
use replay_tests::ranks::{Ended, case, only, own_builder, program, run, run_by, texts};
use replay_tests::{bytes, randn};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

struct Layer(nn::Linear);

impl Layer {
    #[replay_block]
    fn forward(&self, x: &Tensor) -> Tensor {
        x + self.0.forward(x).tanh()
    }
}

/// Two steps, and then one line of output: the losses, and what has become of this rank's pieces.
fn train(dist: Dist) {
    tch::set_num_threads(1);
    tch::manual_seed(7);
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = |i: usize| Layer(nn::linear(vs.root() / "layers" / i, 7, 7, nn::LinearConfig::default()));
    let layers: Vec<_> = (0..2).map(layer).collect();
    let builder = Sharded::builder(&dist, &vs).unit("layers.0", &layers[0]).unit("layers.1", &layers[1]);
    let sharded = builder.build().unwrap();
    let mut optimizer = Optimizer::new(&sharded, nn::AdamW::default(), 1e-2).unwrap();
    let mut losses = Vec::new();
    for step in 0..2 {
        let rollout = Rollout::new(&sharded);
        let mut x = randn(10 * step + i64::try_from(dist.rank()).unwrap(), &[4, 7], Kind::Float);
        for layer in &layers {
            x = layer.forward_replay(&rollout, &x).unwrap();
        }
        let loss = x.square().mean(Kind::Float);
        rollout.backward(&loss).unwrap();
        sharded.clip_grad_norm(0.1).unwrap();
        optimizer.step().unwrap();
        sharded.zero_grad();
        losses.push(f64::try_from(loss).unwrap().to_bits());
    }
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    let values: Vec<_> = variables.iter().flat_map(|(_, variable)| bytes(variable)).collect();
    // In one write, shorter than what a pipe takes at once: torchrun's processes share an output, and `println` writes in parts.
    let line = format!("\nBITS of {}: {losses:?} {values:?} END\n", dist.rank());
    assert!(line.len() < 4096);
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    dist.shutdown().unwrap();
}

/// What a rank has said, wherever it stands in the output.
fn bits(rank: usize, output: &str) -> String {
    let line = output.split(&format!("BITS of {rank}: ")).nth(1).and_then(|rest| rest.split_once(" END"));
    line.unwrap_or_else(|| panic!("rank {rank} has said nothing:\n{output}")).0.to_owned()
}

/// Those of two processes of this machine.
fn expected(test: &str) -> [String; 2] {
    let ended = run(test, "file", 2, |_, _| ());
    assert!(ended.iter().all(|rank| rank.status.success()), "{}", texts(&ended));
    [0, 1].map(|rank| bits(rank, &ended[rank].output))
}

/// In a process that another one of this test has started: what it is to do.
fn task() -> Option<(DistBuilder, String)> {
    let file = own_builder()?;
    let case = case();
    let builder = if case == "file" {
        file
    } else {
        Dist::builder_from_env().unwrap().timeout(Duration::from_secs(20)).connect_timeout(Duration::from_secs(30))
    };
    Some((builder, case))
}

/// Set in the process that has two networks for itself.
const HOSTS: &str = "REPLAY_TEST_HOSTS";

/// Starts this test once more where it may make networks: in a network and a mount namespace that end with its processes, whatever
/// ends them.
fn between_hosts(test: &str) {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount"]).arg(program()).args(only(test)).env(HOSTS, "1");
    let status = command.status().expect("`unshare` is there");
    assert!(status.success(), "{test} between two hosts: {status}");
}

/// Two hosts: this process's own network, and the namespace `other`.
fn make_hosts() {
    let make = "set -e
        mount -t tmpfs none /run
        ip netns add other
        ip link add wire0 type veth peer name wire1 netns other
        ip addr add 10.77.0.1/24 dev wire0
        ip link set wire0 up
        ip link set lo up
        ip -n other addr add 10.77.0.2/24 dev wire1
        ip -n other link set wire1 up
        ip -n other link set lo up";
    assert!(Command::new("sh").args(["-c", make]).status().unwrap().success(), "two hosts with a wire between them");
}

/// One rank on each host, with what torchrun would tell it, and the interface where it is to be named.
fn on_hosts(test: &str, case: &str, named: bool) -> Vec<Ended> {
    let start = |rank: usize| {
        let mut command = Command::new("ip");
        match rank {
            0 => command = Command::new(program()),
            _ => drop(command.args(["netns", "exec", "other"]).arg(program())),
        }
        let rank = rank.to_string();
        command.env("RANK", &rank).env("GROUP_RANK", &rank).env("LOCAL_RANK", "0").env("WORLD_SIZE", "2");
        command.env("GROUP_WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "1");
        command.env("MASTER_ADDR", "10.77.0.1").env("MASTER_PORT", "29517").env_remove("GLOO_SOCKET_IFNAME");
        if named {
            command.env("GLOO_SOCKET_IFNAME", format!("wire{rank}"));
        }
        command
    };
    run_by(test, case, 2, start, |_, _| ())
}

#[test]
#[cfg_attr(not(namespaces), ignore = "needs root, `unshare` and `ip netns`, and build.rs found them not to work")]
fn two_hosts_have_the_bits_of_one() {
    const NAME: &str = "two_hosts_have_the_bits_of_one";
    if let Some((builder, _)) = task() {
        return train(builder.connect().unwrap());
    }
    if std::env::var_os(HOSTS).is_none() {
        return between_hosts(NAME);
    }
    make_hosts();
    let ended = on_hosts(NAME, "hosts", true);
    assert!(ended.iter().all(|rank| rank.status.success()), "{}", texts(&ended));
    assert_eq!([0, 1].map(|rank| bits(rank, &ended[rank].output)), expected(NAME));
}

/// Gloo takes the interface that leads nowhere then, and says `connection refused`.
#[test]
#[cfg_attr(not(namespaces), ignore = "needs root, `unshare` and `ip netns`, and build.rs found them not to work")]
fn two_hosts_without_a_name_for_their_network_are_told_to_give_one() {
    const NAME: &str = "two_hosts_without_a_name_for_their_network_are_told_to_give_one";
    if let Some((builder, _)) = task() {
        let error = builder.timeout(Duration::from_secs(4)).connect().unwrap_err();
        println!("{error}");
        return;
    }
    if std::env::var_os(HOSTS).is_none() {
        return between_hosts(NAME);
    }
    make_hosts();
    let ended = on_hosts(NAME, "hosts", false);
    for rank in &ended {
        let says = |text: &str| assert!(rank.output.contains(text), "{text:?}: {}", texts(&ended));
        assert!(rank.status.success(), "{}", texts(&ended));
        says("of 2 found no group");
        says("GLOO_SOCKET_IFNAME, here not set, must name the network interface");
    }
}

/// Set to what a process of torchrun's is to do.
const UNDER_TORCHRUN: &str = "REPLAY_TEST_TORCHRUN";

fn torchrun(test: &str, what: &str, options: &[&str]) -> Output {
    let python = std::env::var_os("REPLAY_PYTHON").expect("REPLAY_PYTHON is a Python that imports torch");
    let mut command = Command::new(python);
    command.args(["-m", "torch.distributed.run", "--standalone", "--no-python"]).args(options);
    command.args(["--nproc-per-node", "2"]).arg(program()).args(only(test)).env(UNDER_TORCHRUN, what);
    // Its own, and what of cargo's would mislead a LibTorch.
    command.env_remove("LD_LIBRARY_PATH").env("RUST_BACKTRACE", "0").output().expect("the Python can be started")
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    format!("{}\n{out}\n{err}", output.status)
}

#[test]
#[cfg_attr(not(torchrun), ignore = "needs REPLAY_PYTHON, a Python that imports torch, and build.rs found none")]
fn torchrun_has_the_bits_of_our_own_launcher() {
    const NAME: &str = "torchrun_has_the_bits_of_our_own_launcher";
    if let Some((builder, _)) = task() {
        return train(builder.connect().unwrap());
    }
    match std::env::var(UNDER_TORCHRUN).as_deref() {
        Err(_) => {}
        // The group that torchrun starts anew is another one, at the store of the first.
        Ok("fails once") if std::env::var("TORCHELASTIC_RESTART_COUNT").as_deref() == Ok("0") => {
            let dist = Dist::from_env().unwrap();
            dist.barrier().unwrap();
            std::process::exit(i32::try_from(dist.rank()).unwrap());
        }
        Ok(_) => return train(Dist::from_env().unwrap()),
    }
    let expected = expected(NAME);
    for (what, options) in [("trains", &["--max-restarts", "0"]), ("fails once", &["--max-restarts", "1"])] {
        let output = torchrun(NAME, what, options);
        let text = text(&output);
        assert!(output.status.success(), "{what}: {text}");
        assert_eq!([0, 1].map(|rank| bits(rank, &text)), expected, "{what}");
    }
}

/// A rank that fails says why, the other says who, and torchrun's summary has it.
#[test]
#[cfg_attr(not(torchrun), ignore = "needs REPLAY_PYTHON, a Python that imports torch, and build.rs found none")]
fn torchruns_summary_says_why() {
    const NAME: &str = "torchruns_summary_says_why";
    if std::env::var_os(UNDER_TORCHRUN).is_some() {
        let dist = Dist::from_env().unwrap();
        let error: Box<dyn std::error::Error> = match dist.rank() {
            1 => "the pump broke".into(),
            _ => dist.barrier().unwrap_err().into(),
        };
        report_failure(&*error).unwrap();
        println!("\nSAID by {}: {error}", dist.rank());
        drop(dist);
        std::process::exit(3);
    }
    let output = torchrun(NAME, "fails", &["--max-restarts", "0"]);
    let text = text(&output);
    assert!(!output.status.success(), "{text}");
    let summary = text.split("Root Cause").nth(1).unwrap_or_else(|| panic!("no summary: {text}"));
    assert!(summary.contains("exitcode  : 3"), "{text}");
    assert!(summary.contains("the pump broke") || summary.contains("rank 1 said: it ended without"), "{text}");
}
