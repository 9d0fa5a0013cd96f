//! What this process uses: memory and faults, and processor time.

use anyhow::{Context as _, Result};
use rustix::time::{ClockId, clock_gettime};

/// Seconds of processor time of all threads of this process.
#[expect(clippy::cast_precision_loss, reason = "seconds and nanoseconds of a process are few")]
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A memory figure of `/proc/self/status` in MiB: `VmRSS` is resident now, `VmHWM` its highest so far.
pub(crate) fn memory_mb(field: &str) -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")
        .context("no /proc/self/status: memory is measured on Linux only")?;
    field_mb(&status, field).with_context(|| format!("/proc/self/status has no {field}"))
}

fn field_mb(status: &str, field: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

/// Page faults that needed no disk, from the start of this process.
pub(crate) fn page_faults() -> Result<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("no /proc/self/stat")?;
    faults(&stat).context("/proc/self/stat has no count of faults")
}

fn faults(stat: &str) -> Option<u64> {
    // The name of the program stands in brackets, and may hold spaces; the count is the eighth field after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_in_mebibytes() {
        let status = "Name:\tbench\nVmHWM:\t  256000 kB\nVmRSS:\t  128000 kB\n";
        assert_eq!(field_mb(status, "VmRSS"), Some(125.0));
        assert_eq!(field_mb(status, "VmSwap"), None);
    }

    #[test]
    fn faults_are_counted_whatever_the_name_of_the_program() {
        assert_eq!(faults("12 (a b) c) R 1 2 3 4 5 6 789 0 9"), Some(789));
        assert_eq!(faults("12"), None);
    }

    #[test]
    fn a_touched_page_is_a_fault() {
        let before = page_faults().unwrap();
        let pages = vec![1_u8; 4 << 20];
        assert!(pages.iter().map(|&byte| usize::from(byte)).sum::<usize>() == 4 << 20);
        assert!(page_faults().unwrap() > before);
    }
}
