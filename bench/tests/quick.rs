//! The whole benchmark, as small as it goes: its results are read and calculated again.

#![expect(clippy::float_cmp, reason = "what was stored is what is read")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn bench(out: &Path, words: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_replay-bench"));
    let output = command.args(words).arg("--out").arg(out).output().expect("the benchmark starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn number(value: &Value, field: &str) -> f64 {
    value[field].as_f64().unwrap_or_else(|| panic!("{field} is no number: {value}"))
}

#[test]
fn results_are_whole_and_quotients_of_their_own_times() {
    let out = tempfile::tempdir().unwrap();
    let document = out.path().join("document.md");
    let words = ["--workloads", "tiny", "--arms", "replay", "--blocks", "4", "--rounds", "1", "--repeats", "1"];
    let text = bench(out.path(), &[&words[..], &["--quick", "--markdown", document.to_str().unwrap()]].concat());
    assert!(text.contains("\ntiny, 4 blocks (1 rounds"), "{text}");
    let results: Value = serde_json::from_slice(&std::fs::read(out.path().join("results.json")).unwrap()).unwrap();
    let rows = results.as_array().unwrap();
    let arms: Vec<_> = rows.iter().map(|row| row["arm"].as_str().unwrap()).collect();
    assert_eq!(arms, ["plain", "plain-again", "replay"]);
    for row in rows {
        check(row, &rows[0]);
    }
    for file in ["results.png", "scaling.png", "run.json", "scaling.json"] {
        assert!(out.path().join(file).metadata().unwrap().len() > 100, "{file}");
    }
    let document = std::fs::read_to_string(document).unwrap();
    assert!(document.contains("\n## tiny, 4 blocks\n") && document.contains("\n| replay | "), "{document}");
}

fn check(row: &Value, plain: &Value) {
    for field in ["wall_median", "cpu_median", "peak_mb", "live_peak_mb", "page_faults", "overhead_us"] {
        assert!(number(row, field).is_finite(), "{field}");
    }
    assert_eq!(number(row, "blocks"), 4.0);
    assert_eq!(row["gradients"], plain["gradients"], "gradients have equal bits");
    assert_eq!(number(row, "relative_difference"), 0.0);
    let round = &row["rounds"][0];
    assert!((number(row, "ratio_to_plain") - number(round, "cpu") / number(round, "plain_cpu")).abs() < 1e-9);
    assert_eq!(number(round, "plain_cpu"), number(&plain["rounds"][0], "cpu"), "the plain arm of the same round");
    let replayed = row["arm"].as_str().unwrap().starts_with("replay");
    assert_eq!((row["saved_bytes"].is_u64(), row["predicted_ratio"].is_f64()), (replayed, replayed), "{row}");
    // Four weights and biases of 16, whose gradients all live at the end.
    assert!(number(row, "live_peak_mb") * f64::from(1 << 20) > 4.0 * (3.0 * 16.0 * 17.0));
}

#[test]
fn live_bytes_are_counted_exactly() {
    // Each block of the decoder adds one input of 4 x 256 x 256 floats to what a rollout keeps.
    let mut command = Command::new(env!("CARGO_BIN_EXE_replay-bench"));
    let output = command.args(["scaling", "--arms", "replay", "--blocks", "2,3"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(" adds 1.0000 MiB, 1.000 times the 1.0000 MiB of inputs that it alone reads"), "{text}");
}
