//! Random programs of blocks against the oracles, healthy and failing: see `replay_tests::program`.
//!
//! `REPLAY_SEED` and `REPLAY_CASES` choose other programs. `cargo xtask soak` runs the long form.

use std::cell::RefCell;
use std::str::FromStr;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use replay_tests::program::{Census, check, programs};

/// How many programs, and where their sequence starts.
const CASES: u32 = 1000;
const SEED: u64 = 1;

/// Programs that the long form runs from one seed.
const BATCH: u32 = 200;

/// What programs do, and how many of a thousand at least: about half of what they do now.
const EXPECTED: [(&str, usize); 48] = [
    ("16-bit numbers", 80),
    ("64-bit numbers", 200),
    ("an output in several blocks", 50),
    ("autocast", 50),
    ("blocks in blocks", 250),
    ("blocks in blocks in blocks", 150),
    ("buffers read", 170),
    ("buffers updated in a block", 130),
    ("chains of blocks", 200),
    ("compared with blockwise autograd", 1000),
    ("compared with plain autograd", 200),
    ("complex inputs", 80),
    ("complex numbers", 100),
    ("detached outputs", 150),
    ("empty inputs", 40),
    ("exact numbers", 200),
    ("failures in a forward", 60),
    ("failures in a replay", 40),
    ("frozen parameters", 120),
    ("graphs kept", 110),
    ("replays ended early", 60),
    ("in place by the caller", 200),
    ("in place inside a body", 130),
    ("inputs as outputs", 300),
    ("inputs without dimensions", 50),
    ("inputs without grad", 300),
    ("integer inputs", 130),
    ("integer outputs", 170),
    ("integers that select", 10),
    ("leaves as inputs", 300),
    ("old gradients", 240),
    ("outputs compared", 250),
    ("one tensor in several blocks", 200),
    ("one tensor twice in a block", 300),
    ("parameters as outputs", 180),
    ("parameters outside of blocks", 160),
    ("random numbers between blocks", 60),
    ("random numbers in a block", 250),
    ("real numbers compared with plain autograd", 35),
    ("rollouts that go on after a failure", 30),
    ("several outputs", 400),
    ("several rollouts", 250),
    ("tied parameters", 60),
    ("trainable tensors of no store", 120),
    ("unused outputs", 400),
    ("views as inputs", 130),
    ("views as outputs", 170),
    ("failures inside of blocks in blocks", 30),
];

fn number<T: FromStr>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().ok().unwrap_or_else(|| panic!("{variable}={text} is no number")))
}

/// Runs so many programs of a seed; the first that fails is made small and reported.
fn run(cases: u32, seed: u64, census: &RefCell<Census>) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 4000, ..Config::default() };
    let outcome = TestRunner::new_with_rng(config, rng)
        .run(&programs(), |program| check(&program, &mut census.borrow_mut()).map_err(TestCaseError::fail));
    if let Err(error) = outcome {
        panic!(
            "{error}\nagain: REPLAY_SEED={seed} REPLAY_CASES={cases} cargo test --test properties random_programs -- --nocapture"
        );
    }
}

#[test]
fn random_programs_equal_their_oracles() {
    let (cases, seed) = (number("REPLAY_CASES").unwrap_or(CASES), number("REPLAY_SEED").unwrap_or(SEED));
    let census = RefCell::default();
    let start = Instant::now();
    run(cases, seed, &census);
    let census = census.into_inner();
    println!("{} programs in {:.1} s: {:#?}", census.programs, start.elapsed().as_secs_f64(), census.features);
    // Of few programs too little can be expected.
    for (what, least) in EXPECTED.into_iter().filter(|_| cases >= CASES) {
        let found = census.features.get(what).copied().unwrap_or(0);
        assert!(found >= least * census.programs / 1000, "{found} programs with {what}");
    }
}

/// Resident memory of this process in MiB.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
    let pages: u64 = statm.split_whitespace().nth(1).expect("the second field").parse().expect("a number");
    pages * 4 / 1024
}

/// What memory may grow by between the first third of the time and the end, in MiB.
const MARGIN: u64 = 48;

#[test]
#[ignore = "takes as long as it is told: run it by cargo xtask soak"]
fn random_programs_until_the_time_is_up() {
    let time = Duration::from_secs(number("REPLAY_SOAK_SECONDS").unwrap_or(60));
    let mut seed = number("REPLAY_SEED").unwrap_or(SEED);
    let census = RefCell::default();
    let (start, mut told, mut early) = (Instant::now(), 0, 0);
    while start.elapsed() < time {
        run(BATCH, seed, &census);
        seed += 1;
        let seconds = start.elapsed().as_secs();
        if start.elapsed() < time / 3 {
            early = resident().max(early);
        }
        if seconds / 60 > told {
            told = seconds / 60;
            println!("{told} min: {} programs, next seed {seed}, {} MiB", census.borrow().programs, resident());
        }
    }
    let end = resident();
    println!("{} programs, next seed {seed}, {early} MiB in the first third, {end} MiB now", census.borrow().programs);
    assert!(end <= early + MARGIN, "memory grew from {early} to {end} MiB");
}
