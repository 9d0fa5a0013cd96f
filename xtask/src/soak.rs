//! The long search for faults: random programs with ever new seeds, then the macro's fuzz target, then the tests of memory
//! under `AddressSanitizer` and valgrind, where those are installed, and a program with `panic = "abort"`. Not a part of what a
//! change must pass.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};

use crate::environment::Environment;
use crate::{cargo, libtorch};

/// What to search, and for how long.
#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    /// How many minutes: four fifths of them random programs, one fifth the macro's fuzz target. Builds come on top.
    #[arg(long, default_value_t = 15.0, value_parser = minutes)]
    minutes: f64,
    /// Where the sequence of random programs starts; another place each time if not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Leave out what comes after that: a short form under `AddressSanitizer`, valgrind, and a program with `panic =
    /// "abort"`. The first and the last compile torch-sys once more each (10 minutes).
    #[arg(long)]
    no_sanitizers: bool,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 100_000.0 => Ok(minutes),
        _ => Err("not a number of minutes".to_owned()),
    }
}

/// How the time is spent.
#[derive(Debug, PartialEq, Eq)]
struct Schedule {
    programs: Duration,
    fuzzing: Duration,
}

impl Schedule {
    fn of(minutes: f64) -> Self {
        let second = |part: f64| Duration::from_secs_f64((minutes * 60.0 * part).round().max(1.0));
        Self { programs: second(0.8), fuzzing: second(0.2) }
    }
}

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What makes libFuzzer see which code runs; the passes are rustc's own, on every channel.
const COVERAGE: [&str; 7] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "--cfg=fuzzing",
];

/// Searches; the first fault ends it.
pub(crate) fn run(env: &Environment, options: &Options) -> Result<()> {
    libtorch::ensure(env, libtorch::Flavour::Cpu)?;
    let schedule = Schedule::of(options.minutes);
    let seed = options.seed.unwrap_or_else(another_seed);
    println!("=== random programs for {} s, from seed {seed}", schedule.programs.as_secs());
    programs(env, schedule.programs, seed)?;
    println!("=== the macro's fuzz target for {} s", schedule.fuzzing.as_secs());
    fuzz(env, schedule.fuzzing, seed)?;
    if !options.no_sanitizers {
        sanitize(env)?;
        valgrind(env)?;
        aborting(env)?;
    }
    println!("=== nothing found");
    Ok(())
}

/// Seconds since 1970, in steps that leave room for the seeds of one run.
fn another_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()) * 1000
}

fn programs(env: &Environment, time: Duration, seed: u64) -> Result<()> {
    // The time begins when all is built.
    cargo::check(cargo::command(env).args(["test", "--locked", "--test", "properties", "--no-run"]))?;
    let mut cargo = cargo::command(env);
    cargo.args(["test", "--locked", "--test", "properties", "--", "--ignored", "--nocapture"]);
    cargo.env("REPLAY_SOAK_SECONDS", time.as_secs().to_string()).env("REPLAY_SEED", seed.to_string());
    cargo::check(&mut cargo)
}

fn fuzz(env: &Environment, time: Duration, seed: u64) -> Result<()> {
    let target = env.root.join("target/fuzz");
    let mut build = cargo::command(env);
    build.args(["build", "--locked", "--release", "--target", TARGET, "--manifest-path", "fuzz/Cargo.toml"]);
    cargo::check(build.arg("--target-dir").arg(&target).env("RUSTFLAGS", COVERAGE.join(" ")))?;

    // What an earlier run found worth keeping is where this one starts.
    let corpus = target.join("corpus");
    std::fs::create_dir_all(&corpus).with_context(|| format!("{} cannot be made", corpus.display()))?;
    let program = target.join(TARGET).join("release/expand");
    let mut expand = fuzzer(&program, &corpus, &target, time, seed);
    let cannot_start = || format!("{} cannot be started", program.display());
    let mut child = expand.stderr(Stdio::piped()).spawn().with_context(cannot_start)?;
    for line in BufReader::new(child.stderr.take().context("it is piped")?).lines() {
        let line = line.context("the fuzz target's output cannot be read")?;
        if worth_telling(&line) {
            println!("{line}");
        }
    }
    let status = child.wait().context("the fuzz target is lost")?;
    if !status.success() {
        bail!("the fuzz target failed ({status}); again: {} <the file named above>", program.display());
    }
    Ok(())
}

/// Not the words that libFuzzer recommends for a dictionary.
fn worth_telling(line: &str) -> bool {
    !line.starts_with('"') && !line.starts_with("######")
}

fn fuzzer(program: &Path, corpus: &Path, artifacts: &Path, time: Duration, seed: u64) -> Command {
    let mut command = Command::new(program);
    command.arg(corpus).args(["-max_len=256", "-print_final_stats=1", "-verbosity=0"]);
    command.arg(format!("-max_total_time={}", time.as_secs()));
    // libFuzzer takes 32 bits, and 0 stands for any.
    command.arg(format!("-seed={}", (seed % 0xffff_ffff) + 1));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command
}

/// Programs and the tests that are about memory, with Rust's side and the shim instrumented.
fn sanitize(env: &Environment) -> Result<()> {
    println!("=== AddressSanitizer");
    let Some(rustup) = env.program("rustup").filter(|rustup| has_nightly(rustup)) else {
        println!("skipped: no nightly Rust (`rustup toolchain install nightly`)");
        return Ok(());
    };
    // The workspace's own toolchain has no sanitizers.
    let mut nightly = Command::new(rustup);
    nightly.current_dir(&env.root).env_remove("LIBTORCH").env_remove("LIBTORCH_USE_PYTORCH");
    nightly.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC");
    nightly.args(["run", "nightly", "cargo", "test", "--locked", "--target", TARGET]);
    nightly.arg("--target-dir").arg(env.root.join("target/asan")).args(memory_tests());
    // C++ calls the same runtime, whichever compiler instruments it.
    nightly.env("RUSTFLAGS", "-Zsanitizer=address").env("CXXFLAGS", "-fsanitize=address").env("REPLAY_CASES", "200");
    // LibTorch keeps what it has set up until the process ends.
    nightly.env("ASAN_OPTIONS", "detect_leaks=0");
    cargo::check(&mut nightly)
}

fn has_nightly(rustup: &Path) -> bool {
    let mut probe = Command::new(rustup);
    probe.args(["run", "nightly", "rustc", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success())
}

/// Not those that look at how large the process is: freed memory is held back.
fn memory_tests() -> impl Iterator<Item = &'static str> {
    let of_threads = ["soundness", "once", "threads", "rng_threads"];
    let of_graphs =
        ["captures_escapes", "early_stop", "early_stop_bodies", "keep_graphs", "memory_bytes", "memory_skips"];
    let of_gradients = ["accumulation_in_place", "accumulation_kinds", "accumulation_none"];
    let others = ["buffers", "chain", "chain_failure", "sequential", "properties"];
    let files = of_threads.into_iter().chain(of_graphs).chain(of_gradients).chain(others);
    files.flat_map(|file| ["--test", file])
}

/// A few tests with every read and write of LibTorch watched too, which is slow.
fn valgrind(env: &Environment) -> Result<()> {
    println!("=== valgrind");
    let Some(program) = env.program("valgrind") else {
        println!("skipped: no valgrind (usually the system's package `valgrind`)");
        return Ok(());
    };
    let mut cargo = cargo::command(env);
    cargo.args(["test", "--locked", "--test", "once", "--test", "accumulation", "--test", "keep_graphs"]);
    cargo::check(cargo.env(runner_variable(), runner(&program, &env.root)))
}

/// A program in which nothing may unwind.
fn aborting(env: &Environment) -> Result<()> {
    println!("=== panic = \"abort\"");
    let mut cargo = cargo::command(env);
    cargo.args(["run", "--locked", "--example", "panics", "--target-dir"]).arg(env.root.join("target/abort"));
    cargo::check(cargo.env("CARGO_PROFILE_DEV_PANIC", "abort"))
}

/// Tells cargo what to start test programs with.
fn runner_variable() -> String {
    format!("CARGO_TARGET_{}_RUNNER", TARGET.to_uppercase().replace('-', "_"))
}

fn runner(valgrind: &Path, root: &Path) -> String {
    let suppressions: PathBuf = root.join("tests/valgrind.supp");
    format!(
        "{} --quiet --error-exitcode=9 --leak-check=no --suppressions={}",
        valgrind.display(),
        suppressions.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(words: &[&str]) -> Result<Options, String> {
        let line = Line::try_parse_from(["soak"].iter().chain(words));
        line.map(|line| line.options).map_err(|error| error.to_string())
    }

    #[test]
    fn a_quarter_of_an_hour_is_the_default() {
        let options = parse(&[]).unwrap();
        assert!((options.minutes - 15.0).abs() < f64::EPSILON);
        assert!(options.seed.is_none() && !options.no_sanitizers);
    }

    #[test]
    fn all_can_be_chosen() {
        let options = parse(&["--minutes", "0.5", "--seed", "7", "--no-sanitizers"]).unwrap();
        assert_eq!((Schedule::of(options.minutes), options.seed), (Schedule::of(0.5), Some(7)));
        assert!(options.no_sanitizers);
    }

    #[test]
    fn no_time_is_an_error() {
        for wrong in ["0", "-1", "NaN", "inf", "soon"] {
            assert!(
                parse(&[&format!("--minutes={wrong}")]).unwrap_err().contains("not a number of minutes"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn the_schedule_adds_up() {
        let Schedule { programs, fuzzing } = Schedule::of(15.0);
        assert_eq!((programs.as_secs(), fuzzing.as_secs()), (720, 180));
    }

    #[test]
    fn each_part_gets_a_second_at_least() {
        // To libFuzzer, 0 seconds are no end.
        assert_eq!(Schedule::of(0.001), Schedule { programs: Duration::from_secs(1), fuzzing: Duration::from_secs(1) });
    }

    #[test]
    fn the_fuzzers_seed_is_never_any() {
        for seed in [0, 1, 0xffff_fffe, 0xffff_ffff, u64::MAX] {
            let command = fuzzer(Path::new("expand"), Path::new("c"), Path::new("a"), Duration::from_secs(3), seed);
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            let seed: u32 = words.iter().find_map(|word| word.strip_prefix("-seed=")).unwrap().parse().unwrap();
            assert!(seed > 0);
            assert!(
                words.contains(&"-max_total_time=3".to_owned()) && words.contains(&"-artifact_prefix=a/".to_owned())
            );
        }
    }

    #[test]
    fn cargo_is_told_what_to_start_tests_with() {
        assert_eq!(runner_variable(), "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER");
        let line = runner(Path::new("/bin/valgrind"), Path::new("/repo"));
        assert!(line.starts_with("/bin/valgrind ") && line.ends_with("=/repo/tests/valgrind.supp"));
    }
}
