//! Guarantee *sharded*, where a process fails: every other one ends with an error that says who, at what, within the timeout.
//! None hangs, aborts, or goes on with a wrong value.

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::process::Command;
use std::time::Duration;

use replay_runtime::dist::Dist;
use replay_runtime::{Rollout, Sharded, is_replaying, replay_block};
use replay_tests::randn;
use replay_tests::ranks::{Ended, case, own_builder, run, texts};
use tch::nn::{Module, OptimizerConfig};
use tch::{Device, Kind, Tensor, nn};

/// The rank that does something else than the others.
const CULPRIT: usize = 1;
const TIMEOUT: Duration = Duration::from_secs(6);
/// A rank that fails ends with it.
const FAILED: i32 = 3;

/// What it does, in its second step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Swap,
    FewerBlocks,
    MoreSteps,
    OtherShape,
    KilledInForward,
    KilledInReplay,
    Stopped,
    PanicInForward,
    PanicInReplay,
    ErrorInForward,
    ErrorInReplay,
    Exit,
    Return,
    WeightChanged,
    NoGradient,
    ForgottenRollout,
    NotClipped,
}

const FAULTS: [Fault; 17] = [
    Fault::Swap,
    Fault::FewerBlocks,
    Fault::MoreSteps,
    Fault::OtherShape,
    Fault::KilledInForward,
    Fault::KilledInReplay,
    Fault::Stopped,
    Fault::PanicInForward,
    Fault::PanicInReplay,
    Fault::ErrorInForward,
    Fault::ErrorInReplay,
    Fault::Exit,
    Fault::Return,
    Fault::WeightChanged,
    Fault::NoGradient,
    Fault::ForgottenRollout,
    Fault::NotClipped,
];

struct Layer {
    linear: nn::Linear,
    fault: Option<Fault>,
}

fn signal(name: &str) {
    let me = std::process::id().to_string();
    Command::new("kill").args([name, &me]).status().expect("a signal can be sent");
    // The others see to what comes of it.
    std::thread::sleep(Duration::from_mins(1));
}

impl Layer {
    #[replay_block]
    fn forward(&self, x: &Tensor, #[meta] step: usize) -> Result<Tensor, io::Error> {
        self.apply(x, step)
    }

    #[replay_block(early_stop)]
    fn forward_early(&self, x: &Tensor, #[meta] step: usize) -> Result<Tensor, io::Error> {
        self.apply(x, step)
    }

    fn apply(&self, x: &Tensor, step: usize) -> Result<Tensor, io::Error> {
        match self.fault.filter(|_| step == 1) {
            Some(Fault::KilledInForward) => signal("-KILL"),
            Some(Fault::KilledInReplay) if is_replaying() => signal("-KILL"),
            Some(Fault::Stopped) if is_replaying() => signal("-STOP"),
            Some(Fault::PanicInForward) => panic!("the pump broke"),
            Some(Fault::PanicInReplay) if is_replaying() => panic!("the pump broke"),
            Some(Fault::ErrorInForward) => return Err(io::Error::other("the pump broke")),
            Some(Fault::ErrorInReplay) if is_replaying() => return Err(io::Error::other("the pump broke")),
            Some(Fault::Exit) => std::process::exit(0),
            _ => {}
        }
        Ok(x + self.linear.forward(x).tanh())
    }
}

fn train(dist: Dist, fault: Option<Fault>) -> Result<(), Box<dyn Error>> {
    tch::set_num_threads(1);
    tch::manual_seed(7);
    let vs = nn::VarStore::new(Device::Cpu);
    let width = if fault == Some(Fault::OtherShape) { 6 } else { 5 };
    let layer = |i: usize| {
        let linear = nn::linear(vs.root() / "layers" / i, width, width, nn::LinearConfig::default());
        Layer { linear, fault: fault.filter(|_| i == 1) }
    };
    let layers: Vec<_> = (0..3).map(layer).collect();
    let mut sharded = Sharded::builder(&dist, &vs).overlap(dist.world() == 3);
    for (i, layer) in layers.iter().enumerate() {
        sharded = sharded.unit(&format!("layers.{i}"), layer);
    }
    let sharded = sharded.build()?;
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-2)?;
    let steps = if fault == Some(Fault::MoreSteps) { 4 } else { 3 };
    for step in 0..steps {
        let fault = fault.filter(|_| step == 1);
        let rollout = Rollout::new(&sharded);
        let mut x = randn(3, &[4, width], Kind::Float);
        let order = if fault == Some(Fault::Swap) { [0, 2, 1] } else { [0, 1, 2] };
        let count = if fault == Some(Fault::FewerBlocks) { 2 } else { 3 };
        for &i in &order[..count] {
            // In a world of two with early stop, in one of three with transfers that overlap.
            let run = if dist.world() == 2 { Layer::forward_early_replay } else { Layer::forward_replay };
            x = run(&layers[i], &rollout, &x, step)?;
        }
        match fault {
            Some(Fault::Return) => return Ok(()),
            Some(Fault::WeightChanged) => tch::no_grad(|| drop(layers[0].linear.ws.shallow_clone().fill_(0.1))),
            Some(Fault::NoGradient) => x = x.detach(),
            Some(Fault::ForgottenRollout) => {
                std::mem::forget(rollout);
                continue;
            }
            _ => {}
        }
        rollout.backward(&x.square().mean(Kind::Float))?;
        if fault != Some(Fault::NotClipped) {
            sharded.clip_grad_norm(1.0)?;
        }
        optimizer.step();
        sharded.zero_grad();
    }
    dist.shutdown()?;
    Ok(())
}

/// What each of the others says, and what the culprit does, if it lives.
fn expected(fault: Fault) -> ([&'static str; 2], &'static str) {
    match fault {
        Fault::Swap => (["do not do the same", "rank 1: gather of `layers.2`"], "do not do the same"),
        Fault::FewerBlocks => (["do not do the same", "gather of `layers.2`"], "do not do the same"),
        Fault::MoreSteps => (["do not do the same", "rank 0: shutdown"], "rank 0: shutdown"),
        Fault::OtherShape => (["rank 1 is not built as rank 0", "the parameters differ"], "is not built as rank 0"),
        Fault::KilledInForward | Fault::Exit => (["gather of `layers.2` failed", "nothing was heard of rank 1"], ""),
        Fault::KilledInReplay | Fault::Stopped => (["failed on rank", "nothing was heard of rank 1"], ""),
        Fault::PanicInForward | Fault::PanicInReplay | Fault::ErrorInForward | Fault::ErrorInReplay => {
            (["rank 1 has failed", "the pump broke"], "the pump broke")
        }
        Fault::Return => (["failed on rank", "rank 1 said: it ended without `shutdown`"], ""),
        Fault::WeightChanged => (["rank 1 has failed", "layers.0.weight"], "layers.0.weight"),
        Fault::NoGradient => (["rank 1 has failed", "require"], "require"),
        Fault::ForgottenRollout => (["do not do the same", "rank 1: gather"], "do not do the same"),
        Fault::NotClipped => (["do not do the same", "all_gather at"], "do not do the same"),
    }
}

fn check(fault: Fault, ended: &[Ended]) -> String {
    let (others, own) = expected(fault);
    let all = || format!("{fault:?}\n{}", texts(ended));
    let mut row = format!("| {fault:?} |");
    for (rank, ended) in ended.iter().enumerate() {
        let texts = if rank == CULPRIT { [own, own] } else { others };
        for text in texts {
            assert!(ended.output.contains(text), "rank {rank} does not say {text:?}: {}", all());
        }
        if rank != CULPRIT {
            assert_eq!(ended.status.code(), Some(FAILED), "rank {rank}: {}", all());
        }
        let line = ended.output.lines().find_map(|line| line.split_once("FAILED: ")).map_or("", |(_, line)| line);
        let _ = write!(row, " {line} ({}) |", ended.status);
    }
    let last = ended.iter().map(|ended| ended.after).max().unwrap();
    row + &format!(" {:.1} s |", last.as_secs_f64())
}

#[test]
fn every_rank_learns_of_every_fault() {
    if let Some(builder) = own_builder() {
        let dist = builder.timeout(TIMEOUT).connect().unwrap();
        let fault = FAULTS.into_iter().find(|fault| format!("{fault:?}") == case()).filter(|_| dist.rank() == CULPRIT);
        if let Err(error) = train(dist, fault) {
            println!("FAILED: {error}");
            std::process::exit(FAILED);
        }
        return;
    }
    let mut table = String::new();
    for world in [2, 3] {
        for fault in FAULTS {
            let ended = run("every_rank_learns_of_every_fault", &format!("{fault:?}"), world, |children, time| {
                // One that has stopped is not ended by anything else.
                if fault == Fault::Stopped && time > TIMEOUT + Duration::from_secs(5) {
                    let _ = children[CULPRIT].kill();
                }
            });
            table += &check(fault, &ended);
            table.push('\n');
        }
    }
    println!("{table}");
}
