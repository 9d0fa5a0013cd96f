//! Runs cargo on the workspace.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::environment::Environment;

/// A cargo command in the root of the workspace.
///
/// It never sees the user's own `LIBTORCH`: the link `.libtorch` leads to the same folder, and torch-sys, minutes of
/// C++, is compiled again whenever that variable changes. So all commands, and a plain `cargo test`, share one build.
pub(crate) fn command(env: &Environment) -> Command {
    let mut command = Command::new(&env.cargo);
    command.current_dir(&env.root).env_remove("LIBTORCH").env_remove("LIBTORCH_USE_PYTORCH");
    command
}

/// Runs the command on this process's own output; a failure is an error that repeats the command.
pub(crate) fn check(command: &mut Command) -> Result<()> {
    let line = line(command);
    let status = command.status().with_context(|| format!("`{line}` cannot be started"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// The command as a user would type it.
fn line(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    let name = program.rsplit('/').next().unwrap_or(&program).to_owned();
    let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
    std::iter::once(name).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_repeats_the_command() {
        let error = check(Command::new("/no/such/cargo").args(["test", "--locked"])).unwrap_err().to_string();
        assert_eq!(error, "`cargo test --locked` cannot be started");
    }
}
