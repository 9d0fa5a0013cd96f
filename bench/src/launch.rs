//! Starts arms in processes of their own and reads their answers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde::de::DeserializeOwned;

use crate::arm::Measured;
use crate::check::Checked;
use crate::modes::Mode;
use crate::workload::Workload;

/// The arms that PyTorch runs, and what `peers.py` calls them.
pub(crate) const PEERS: [(&str, &str); 5] = [
    ("python-plain", "plain"),
    ("nonreentrant", "nonreentrant"),
    ("reentrant", "reentrant"),
    ("nonreentrant+offload", "nonreentrant+offload"),
    ("reference", "reference"),
];

/// A Python with PyTorch, and the script that runs the peers.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    pub(crate) python: PathBuf,
    pub(crate) script: PathBuf,
}

/// How all arms are run.
#[derive(Clone, Debug)]
pub(crate) struct Launcher {
    pub(crate) threads: i32,
    pub(crate) repeats: usize,
    pub(crate) peers: Option<Peers>,
    /// Variables that these processes get beside this one's.
    pub(crate) variables: Vec<(String, OsString)>,
}

impl Launcher {
    /// Times one arm.
    pub(crate) fn time(&self, workload: Workload, arm: &str, blocks: i64) -> Result<Measured> {
        let peer = PEERS.iter().find(|(name, _)| *name == arm);
        let mut command = match (peer, &self.peers) {
            (None, _) => self.arm(workload, arm, blocks, self.repeats)?,
            (Some((_, theirs)), Some(peers)) => {
                let mut command = self.command(&peers.python);
                command.arg(&peers.script).args([workload.name(), theirs, &blocks.to_string()]);
                command.args([self.repeats.to_string(), "--threads".to_owned(), self.threads.to_string()]);
                command
            }
            (Some(_), None) => bail!("the arm `{arm}` needs `--python` and `--peers`"),
        };
        let mut measured: Measured = answer(&mut command)?;
        ensure!(measured.threads == self.threads, "`{arm}` ran with {} threads", measured.threads);
        arm.clone_into(&mut measured.arm);
        Ok(measured)
    }

    /// Takes live bytes and gradients of one arm, on one thread: sums are then taken in a fixed order.
    pub(crate) fn check(&self, workload: Workload, arm: &str, blocks: i64) -> Result<Checked> {
        let alone = Self { threads: 1, ..self.clone() };
        answer(alone.arm(workload, arm, blocks, 1)?.arg("--check"))
    }

    /// The command for an arm of this program's own.
    pub(crate) fn arm(&self, workload: Workload, arm: &str, blocks: i64, repeats: usize) -> Result<Command> {
        ensure!(Mode::named(arm).is_some(), "there is no arm `{arm}`");
        let mut command = self.command(&std::env::current_exe().context("this program has no path")?);
        command.args(["arm", workload.name(), arm, &blocks.to_string(), &repeats.to_string()]);
        command.args(["--threads", &self.threads.to_string()]);
        Ok(command)
    }

    /// The version of PyTorch and the library that its processes load.
    pub(crate) fn python_library(&self) -> Result<Option<(String, PathBuf)>> {
        let Some(peers) = &self.peers else { return Ok(None) };
        let mut command = self.command(&peers.python);
        command.args(["-c", "import torch; print(torch.__version__); print(torch.__file__)"]);
        let text = output(&mut command)?;
        let (version, file) = text.trim().split_once('\n').context("Python did not say where PyTorch is")?;
        Ok(Some((version.to_owned(), Path::new(file).with_file_name("lib").join("libtorch_cpu.so"))))
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        // Cargo's own, which would lead Python to this program's libraries; these have their paths in themselves.
        command.env_remove("LD_LIBRARY_PATH");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }
}

pub(crate) fn answer<T: DeserializeOwned>(command: &mut Command) -> Result<T> {
    let text = output(command)?;
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).with_context(|| format!("not an answer: `{line}`"))
}

fn output(command: &mut Command) -> Result<String> {
    let line = format!("{command:?}");
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("{line} cannot be started"))?;
    ensure!(output.status.success(), "{line} failed ({})", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{line} answers no text"))
}
