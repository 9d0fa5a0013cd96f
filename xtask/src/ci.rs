//! All that a change must pass, in the order of what fails fastest.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::environment::Environment;
use crate::{cargo, libtorch, symbols, unsafe_check};

type Step = fn(&Environment) -> Result<()>;

/// Each step with its heading.
const STEPS: [(&str, Step); 8] = [
    ("format", format),
    ("where `unsafe` stands", |env| unsafe_check::run(&env.root)),
    ("LibTorch", |env| libtorch::ensure(env, libtorch::Flavour::Cpu).map(drop)),
    ("lints", lints),
    ("documentation", documentation),
    ("documentation without LibTorch", documentation_without_libtorch),
    ("what the C++ shim defines", symbols::run),
    ("tests: cargo xtask test", |env| crate::test(env, &[])),
];

/// Runs the steps; the first that fails ends the run.
pub(crate) fn run(env: &Environment) -> Result<()> {
    need(env, "fmt", "rustfmt")?;
    need(env, "clippy", "clippy")?;
    let mut times = Vec::new();
    for (heading, step) in STEPS {
        println!("\n=== {heading}");
        let start = Instant::now();
        let result = step(env);
        let elapsed = start.elapsed();
        println!("=== {heading}: {:.1} s", elapsed.as_secs_f64());
        result.with_context(|| format!("the step \"{heading}\" failed"))?;
        times.push((heading, elapsed));
    }
    println!("\n{}", summary(&times));
    Ok(())
}

fn summary(times: &[(&str, Duration)]) -> String {
    let row = |heading: &str, time: Duration| format!("{:>8.1} s  {heading}", time.as_secs_f64());
    let mut rows: Vec<_> = times.iter().map(|&(heading, time)| row(heading, time)).collect();
    rows.push(row("all steps passed", times.iter().map(|&(_, time)| time).sum()));
    rows.join("\n")
}

/// Makes sure of a part of the toolchain that `rust-toolchain.toml` names: without rustup nobody obeys that file.
fn need(env: &Environment, subcommand: &str, component: &str) -> Result<()> {
    let works = || {
        let mut probe = cargo::command(env);
        let status = probe.args([subcommand, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if works() {
        return Ok(());
    }
    println!("{component} is missing: trying rustup");
    let status = Command::new("rustup").args(["component", "add", component]).current_dir(&env.root).status();
    if status.is_ok_and(|status| status.success()) && works() {
        return Ok(());
    }
    bail!("`cargo {subcommand}` does not work: install {component} for this toolchain (see rust-toolchain.toml)")
}

fn format(env: &Environment) -> Result<()> {
    cargo::check(cargo::command(env).args(["fmt", "--all", "--check"]))
}

fn lints(env: &Environment) -> Result<()> {
    cargo::check(cargo::command(env).args([
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ]))
}

/// `cargo doc` of the two published crates, warnings being errors.
fn doc(env: &Environment) -> Command {
    let mut cargo = cargo::command(env);
    cargo.args(["doc", "--locked", "--no-deps", "--package", "replay-runtime"]).env("RUSTDOCFLAGS", "-D warnings");
    cargo
}

fn documentation(env: &Environment) -> Result<()> {
    cargo::check(doc(env).args(["--package", "replay-macros"]))
}

/// The documentation must build where neither `LibTorch` nor a C++ compiler is, as on a documentation server.
fn documentation_without_libtorch(env: &Environment) -> Result<()> {
    // A folder of its own: the other value of LIBTORCH must not make the real build stale.
    let target = env.root.join("target/doc-only");
    let nowhere = target.join("there-is-none");
    let mut cargo = doc(env);
    cargo.args(["--features", "doc-only", "--target-dir"]).arg(&target);
    cargo::check(cargo.env("LIBTORCH", &nowhere).env("CXX", &nowhere))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_adds_up() {
        let times = [("one", Duration::from_millis(1500)), ("two", Duration::from_secs(2))];
        assert_eq!(summary(&times), "     1.5 s  one\n     2.0 s  two\n     3.5 s  all steps passed");
    }
}
