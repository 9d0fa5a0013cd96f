//! The file in which torchrun expects to find why a process has failed.

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes `error` and its sources to the file that torchrun names in `TORCHELASTIC_ERROR_FILE`, for its summary; does nothing
/// where there is no such variable.
///
/// # Errors
/// If the file cannot be written.
pub fn report_failure(error: &dyn Error) -> io::Result<()> {
    let Some(file) = std::env::var_os("TORCHELASTIC_ERROR_FILE") else { return Ok(()) };
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    std::fs::write(file, record(error, time))
}

/// As torch.distributed.elastic.multiprocessing.errors writes it.
fn record(error: &dyn Error, time: u64) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let _ = write!(text, "\ncaused by: {cause}");
        source = cause.source();
    }
    let text = quoted(&text);
    format!(r#"{{"message": {{"message": {text}, "extraInfo": {{"py_callstack": {text}, "timestamp": "{time}"}}}}}}"#)
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            control if control < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::DistError;

    #[test]
    fn a_record_has_the_text_twice_and_the_time() {
        let error = DistError::Rank { rank: 3, world: 2 };
        let record = record(&error, 12);
        let text = "rank 3 is not one of 2 ranks\\nranks count from 0, and there must be at least one";
        assert_eq!(record.matches(text).count(), 2, "{record}");
        assert!(
            record.starts_with(r#"{"message": {"message": "rank 3"#) && record.ends_with(r#""timestamp": "12"}}}"#)
        );
    }

    #[test]
    fn what_json_does_not_take_is_escaped() {
        assert_eq!(quoted("a\"b\\c\nd\u{1}é"), "\"a\\\"b\\\\c\\nd\\u0001é\"");
    }
}
