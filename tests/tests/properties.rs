//! Random programs of blocks against the oracles, healthy and failing: see `replay_tests::program`.

use std::cell::RefCell;
use std::time::Instant;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use replay_tests::program::{Census, check, programs};

/// How many programs, and where their sequence starts.
const CASES: u32 = 600;
const SEED: u64 = 1;

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().ok().unwrap_or_else(|| panic!("{variable}={text} is no number")))
}

/// Runs so many programs of a seed; the first that fails is made small and reported.
fn run(cases: u32, seed: u64, census: &RefCell<Census>) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let outcome = TestRunner::new_with_rng(config, rng)
        .run(&programs(), |program| check(&program, &mut census.borrow_mut()).map_err(TestCaseError::fail));
    if let Err(error) = outcome {
        panic!("REPLAY_SEED={seed} REPLAY_CASES={cases}: {error}");
    }
}

#[test]
fn random_programs_equal_their_oracles() {
    let (cases, seed) = (number("REPLAY_CASES").unwrap_or(CASES), number("REPLAY_SEED").unwrap_or(SEED));
    let census = RefCell::default();
    let start = Instant::now();
    run(cases, seed, &census);
    println!("{} programs in {:.1} s: {:#?}", cases, start.elapsed().as_secs_f64(), census.borrow().features);
}
