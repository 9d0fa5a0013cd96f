//! Tests over several processes: the test program starts itself once more for each rank.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use replay_runtime::dist::{Dist, DistBuilder};
use tch::Tensor;

const RANK: &str = "REPLAY_TEST_RANK";
const WORLD: &str = "REPLAY_TEST_WORLD";
const PLACE: &str = "REPLAY_TEST_PLACE";
const CASE: &str = "REPLAY_TEST_CASE";

/// No test waits longer for its processes; they are killed then.
const DEADLINE: Duration = Duration::from_secs(90);

/// How a rank has ended.
#[derive(Debug)]
pub struct Ended {
    /// Its code; none where it was killed.
    pub status: ExitStatus,
    /// What it printed.
    pub output: String,
    /// When, from the start of all.
    pub after: Duration,
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs `body` as each rank of a world of each of these sizes, in processes of their own, which must all end well. `test` is
/// the name of the test that calls this.
///
/// # Panics
/// If a rank fails, with what all of them printed.
pub fn each_rank(test: &str, worlds: &[usize], body: impl FnOnce(Dist)) {
    if let Some(builder) = own_builder() {
        body(builder.connect().expect("the other ranks are there"));
        return;
    }
    for &world in worlds {
        let ended = run(test, "", world, |_, _| ());
        assert!(ended.iter().all(|rank| rank.status.success()), "{test}, {world} ranks:\n{}", texts(&ended));
    }
}

/// In a process that was started as a rank: what connects it.
#[must_use]
pub fn own_builder() -> Option<DistBuilder> {
    let (rank, world) = (number(RANK)?, number(WORLD)?);
    let place = PathBuf::from(std::env::var_os(PLACE)?);
    let builder = Dist::builder(rank, world).timeout(Duration::from_secs(20)).connect_timeout(Duration::from_mins(1));
    Some(builder.file(place))
}

/// What the ranks printed.
#[must_use]
pub fn texts(ended: &[Ended]) -> String {
    let text = |(rank, ended): (usize, &Ended)| {
        format!("--- rank {rank}, {}, {:.1?}\n{}", ended.status, ended.after, ended.output)
    };
    ended.iter().enumerate().map(text).collect()
}

/// In a process that was started as a rank: which of the test's cases.
#[must_use]
pub fn case() -> String {
    std::env::var(CASE).unwrap_or_default()
}

/// This program's file.
///
/// # Panics
/// If it is gone.
#[must_use]
pub fn program() -> PathBuf {
    std::env::current_exe().expect("this program has a file")
}

/// What makes this program run one test alone, here and now.
#[must_use]
pub fn only(test: &str) -> [&str; 5] {
    [test, "--exact", "--nocapture", "--test-threads=1", "--include-ignored"]
}

/// Starts `test` as each rank of `world` for that case, and waits for all; `meddle` is called again and again meanwhile with the time.
///
/// # Panics
/// If they cannot be started, or do not end in time.
pub fn run(test: &str, case: &str, world: usize, meddle: impl FnMut(&mut [Child], Duration)) -> Vec<Ended> {
    run_by(test, case, world, |_| Command::new(program()), meddle)
}

/// [`run`] by another command for each rank, which must start [`program`].
///
/// # Panics
/// As `run` does.
pub fn run_by(
    test: &str,
    case: &str,
    world: usize,
    start: impl Fn(usize) -> Command,
    mut meddle: impl FnMut(&mut [Child], Duration),
) -> Vec<Ended> {
    static RUN: AtomicUsize = AtomicUsize::new(0);
    let name = format!("replay-{}-{}", std::process::id(), RUN.fetch_add(1, Ordering::Relaxed));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).expect("a folder for the ranks to meet in");
    let started = Instant::now();
    let outputs: Vec<_> = (0..world).map(|rank| folder.join(format!("output-{rank}"))).collect();
    let mut children: Vec<_> = (0..world)
        .map(|rank| {
            let output = std::fs::File::create(&outputs[rank]).expect("a file for its output");
            let mut command = start(rank);
            command.args(only(test));
            command.env(RANK, rank.to_string()).env(WORLD, world.to_string()).env(PLACE, folder.join("store"));
            command.env(CASE, case).env("RUST_BACKTRACE", "0").env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
            command.stderr(output.try_clone().expect("two handles to it")).stdout(output);
            command.spawn().expect("this program can be started again")
        })
        .collect();
    let mut ended: Vec<Option<(ExitStatus, Duration)>> = vec![None; world];
    while ended.iter().any(Option::is_none) {
        for (child, ended) in children.iter_mut().zip(&mut ended).filter(|(_, ended)| ended.is_none()) {
            *ended = child.try_wait().expect("it is our child").map(|status| (status, started.elapsed()));
        }
        meddle(&mut children, started.elapsed());
        if started.elapsed() > DEADLINE {
            for child in &mut children {
                drop(child.kill());
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let ended: Vec<_> = ended
        .into_iter()
        .flatten()
        .zip(&outputs)
        .map(|((status, after), file)| Ended { status, output: read(file), after })
        .collect();
    let _ = std::fs::remove_dir_all(&folder);
    assert!(started.elapsed() <= DEADLINE, "{test} {case} had to be killed:\n{}", texts(&ended));
    ended
}

/// The piece that a rank has of a parameter, as a vector.
///
/// # Panics
/// If the numbers are too large for LibTorch.
pub fn piece(whole: &Tensor, rank: usize, world: usize) -> Tensor {
    let numel = whole.numel();
    let chunk = numel.div_ceil(world);
    let first = (rank * chunk).min(numel);
    let length = chunk.min(numel - first);
    whole.reshape(-1).narrow(0, i64::try_from(first).unwrap(), i64::try_from(length).unwrap())
}

/// The gradients that all ranks come to: of each use of a parameter the sum in rank order, divided by their number, and these added
/// up. `alone` is what one rank finds, for each parameter, use by use.
///
/// # Panics
/// If a parameter is never used.
pub fn mean_in_rank_order(
    world: usize,
    alone: impl Fn(usize) -> BTreeMap<String, Vec<Tensor>>,
) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::<String, Vec<Tensor>>::new();
    for rank in 0..world {
        for (name, uses) in alone(rank) {
            match all.get_mut(&name) {
                Some(sums) => sums.iter_mut().zip(uses).for_each(|(sum, use_)| *sum = &*sum + use_),
                None => drop(all.insert(name, uses)),
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "processes are few")]
    let part = 1.0 / world as f64;
    let total = |uses: Vec<Tensor>| uses.into_iter().map(|sum| sum * part).reduce(|sum, mean| sum + mean);
    all.into_iter().map(|(name, uses)| (name, total(uses).expect("a use"))).collect()
}
