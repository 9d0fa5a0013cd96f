//! What this process uses: memory from `/proc`, time from the process clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// One reading of resident memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Seconds since the sampling began.
    pub(crate) seconds: f64,
    /// Resident memory in MB.
    pub(crate) mb: f64,
}

/// Seconds of processor time of all threads of this process.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A memory figure of `/proc/self/status` in MB: `VmRSS` is resident now, `VmHWM` its highest so far.
pub(crate) fn memory_mb(field: &str) -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")
        .context("no /proc/self/status: memory is measured on Linux only")?;
    field_mb(&status, field).with_context(|| format!("/proc/self/status has no {field}"))
}

fn field_mb(status: &str, field: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0 / 1e6)
}

/// A thread that reads resident memory every few milliseconds.
#[derive(Debug)]
pub(crate) struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    /// Starts to sample.
    pub(crate) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let begin = Instant::now();
            let mut samples = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(mb) = memory_mb("VmRSS") {
                    samples.push(Sample { seconds: begin.elapsed().as_secs_f64(), mb });
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            samples
        });
        Self { stop, thread }
    }

    /// Ends the sampling and returns what was read.
    pub(crate) fn finish(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_in_megabytes() {
        let status = "Name:\tforecast\nVmHWM:\t  250000 kB\nVmRSS:\t  125000 kB\n";
        assert_eq!(field_mb(status, "VmRSS"), Some(128.0));
        assert_eq!(field_mb(status, "VmSwap"), None);
    }

    #[test]
    fn this_process_uses_memory_and_time() {
        assert!(memory_mb("VmHWM").unwrap() >= memory_mb("VmRSS").unwrap() * 0.5);
        assert!(cpu_seconds() > 0.0);
    }
}
