//! Where and how a run took place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use replay_runtime::bench_support;
use serde::{Deserialize, Serialize};

use crate::launch::Launcher;

/// Variables that change how memory is allocated or how many threads compute, by their beginnings.
const SETTINGS: [&str; 7] = ["MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "OMP_", "MKL_", "KMP_"];

/// What figures depend on beside the programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) date: String,
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_mb: f64,
    pub(crate) kernel: String,
    pub(crate) huge_pages: String,
    /// Settings of allocator and threads that are in force, in all arms alike.
    pub(crate) settings: BTreeMap<String, String>,
    pub(crate) libtorch: String,
    /// PyTorch's version, and whether its library has the same bytes as the one measured here.
    pub(crate) python: Option<(String, bool)>,
    pub(crate) threads: i32,
    pub(crate) load_before: String,
    pub(crate) load_after: String,
    pub(crate) command: String,
}

impl Machine {
    /// This machine, before a run.
    pub(crate) fn read(launcher: &Launcher) -> Result<Self> {
        let python = launcher.python_library()?.map(|(version, library)| {
            let same = own_library().is_some_and(|own| same_bytes(&own, &library));
            (version, same)
        });
        Ok(Self {
            date: command_output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
            processor: line_of("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(0, Into::into),
            memory_mb: line_of("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0.0) / 1024.0,
            kernel: read("/proc/sys/kernel/osrelease"),
            huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled"),
            settings: settings(std::env::vars()),
            libtorch: bench_support::libtorch_version(),
            python,
            threads: launcher.threads,
            load_before: load(),
            load_after: String::new(),
            command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
        })
    }

    /// One line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        let settings: Vec<_> = self.settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let settings = if settings.is_empty() { "none set".to_owned() } else { settings.join(" ") };
        let python = match &self.python {
            None => "no Python arms".to_owned(),
            Some((version, true)) => format!("PyTorch {version}, whose libtorch_cpu.so has the same bytes"),
            Some((version, false)) => format!("PyTorch {version}, whose libtorch_cpu.so is ANOTHER build"),
        };
        vec![
            format!("{}, {} cores, {:.0} MiB, Linux {}", self.processor, self.cores, self.memory_mb, self.kernel),
            format!("LibTorch {}; {python}; {} threads in all arms", self.libtorch, self.threads),
            format!("allocator and thread settings: {settings}; transparent huge pages: {}", self.huge_pages),
            format!("load average before: {}; after: {}", self.load_before, self.load_after),
        ]
    }
}

fn settings(variables: impl Iterator<Item = (String, String)>) -> BTreeMap<String, String> {
    variables.filter(|(name, _)| SETTINGS.iter().any(|setting| name.starts_with(setting))).collect()
}

/// The load average of the last one, five and fifteen minutes.
pub(crate) fn load() -> String {
    read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

fn line_of(path: &str, key: &str) -> String {
    let text = read(path);
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.split_once(':'));
    value.map_or_else(|| "unknown".to_owned(), |(_, value)| value.trim().to_owned())
}

fn command_output(program: &str, words: &[&str]) -> String {
    let output = std::process::Command::new(program).args(words).output();
    output.map_or_else(|_| String::new(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The library that this process has loaded.
fn own_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?.split_whitespace().last().map(PathBuf::from)
}

fn same_bytes(a: &Path, b: &Path) -> bool {
    let (Ok(a), Ok(b)) = (std::fs::read(a), std::fs::read(b)) else { return false };
    a == b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_allocator_and_threads_are_told() {
        let variables = [("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "x"), ("HOME", "/"), ("OMP_NUM_THREADS", "2")];
        let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        let names: Vec<_> = settings(variables).into_keys().collect();
        assert_eq!(names, ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS"]);
    }

    #[test]
    fn the_own_library_is_found_and_files_are_compared() {
        let library = own_library().unwrap();
        assert!(library.is_file());
        let (this, other) = (Path::new("Cargo.toml"), Path::new("build.rs"));
        assert!(same_bytes(this, this) && !same_bytes(this, other) && !same_bytes(this, Path::new("no such")));
    }
}
