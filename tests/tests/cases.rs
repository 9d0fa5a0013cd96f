//! The tables of `tests/README.md`: every public report is there, and every test that a row names exists.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The numbers of the public reports.
const CASES: [u32; 63] = [
    1, 3, 4, 5, 6, 8, 9, 11, 12, 13, 15, 16, 18, 19, 21, 23, 24, 26, 27, 28, 29, 30, 32, 33, 34, 35, 36, 38, 39, 40,
    42, 43, 44, 46, 47, 48, 49, 51, 52, 54, 56, 57, 58, 60, 62, 63, 64, 65, 66, 68, 70, 71, 72, 74, 76, 77, 79, 80, 81,
    83, 84, 85, 87,
];

/// Where the tests of a row run.
const PLACES: [&str; 5] = ["CPU", "GPU", "CPU, GPU", "compiler", "nowhere yet"];

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The cells of the table under the heading, row by row, without the head.
fn table(heading: &str) -> Vec<Vec<String>> {
    let readme = fs::read_to_string(package().join("README.md")).expect("the tests have a README");
    let section = readme.split(&format!("## {heading}\n")).nth(1).unwrap_or_else(|| panic!("no section {heading}"));
    let section = section.split("\n## ").next().expect("at least one part");
    let rows = section.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// A test that a row names.
struct Named {
    file: PathBuf,
    /// `None`: the whole file, which the compiler refuses.
    function: Option<String>,
}

/// `values::a_chain`, `replay-runtime/src/modes_tests.rs::a_chain` or `ui/fail/mut-self.rs`, each in backticks.
fn named(cell: &str) -> Vec<Named> {
    let quoted = cell.split('`').skip(1).step_by(2);
    let tests = package().join("tests");
    quoted
        .map(|name| match name.split_once("::") {
            None => Named { file: tests.join(name), function: None },
            Some((file, function)) => {
                let path =
                    if file.contains('.') { package().join("..").join(file) } else { tests.join(format!("{file}.rs")) };
                Named { file: path, function: Some(function.to_owned()) }
            }
        })
        .collect()
}

/// The attributes of the test function, or an error that says what there is not.
fn attributes(named: &Named) -> Result<String, String> {
    let file = named.file.display();
    let source = fs::read_to_string(&named.file).map_err(|_| format!("no file {file}"))?;
    let Some(function) = &named.function else { return Ok(String::new()) };
    let before = source.split(&format!("fn {function}(")).next().filter(|before| before.len() < source.len());
    let before = before.ok_or_else(|| format!("no function {function} in {file}"))?;
    let lines = before.lines().rev().skip_while(|line| line.is_empty());
    let attributes: Vec<_> =
        lines.take_while(|line| line.starts_with(['#', '/']) || line.trim_start().starts_with('#')).collect();
    let attributes = attributes.join("\n");
    if attributes.contains("#[test]") { Ok(attributes) } else { Err(format!("{function} in {file} is no test")) }
}

/// Where the tests run, by what they say of themselves.
fn place(tests: &[Named]) -> Result<&'static str, String> {
    let mut found = BTreeMap::new();
    for test in tests {
        let attributes = attributes(test)?;
        let place = match &test.function {
            None => "compiler",
            Some(_) if attributes.contains("cfg_attr(not(cuda)") => "GPU",
            Some(_) => "CPU",
        };
        *found.entry(place).or_insert(0) += 1;
    }
    let kinds: Vec<_> = found.into_keys().collect();
    Ok(match kinds[..] {
        [] => "nowhere yet",
        ["CPU", "GPU"] => "CPU, GPU",
        ["GPU"] => "GPU",
        ["compiler"] => "compiler",
        _ => "CPU",
    })
}

fn check(row: &[String]) -> Result<(), String> {
    let [_, what, tests, place_said] = row else { return Err(format!("{} cells instead of 4", row.len())) };
    if what.is_empty() || !PLACES.contains(&place_said.as_str()) {
        return Err(format!("`{what}` runs on `{place_said}`"));
    }
    let place = place(&named(tests))?;
    let reason = tests.starts_with("not yet: ") || tests.starts_with("cannot occur: ");
    if place == "nowhere yet" && !reason {
        return Err("neither a test nor a reason why there is none".to_owned());
    }
    if place == place_said { Ok(()) } else { Err(format!("runs on {place}, and says {place_said}")) }
}

fn assert_checked(heading: &str) {
    let faults: Vec<_> =
        table(heading).iter().filter_map(|row| check(row).err().map(|fault| format!("{}: {fault}", row[0]))).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_public_report_has_its_row_and_its_tests() {
    let numbers: Vec<u32> = table("Public reports").iter().map(|row| row[0].parse().expect("a number")).collect();
    assert_eq!(numbers, CASES);
    assert_checked("Public reports");
}

#[test]
fn every_weakness_of_others_has_its_tests() {
    assert!(table("Where others are weak").len() > 20);
    assert_checked("Where others are weak");
}

#[test]
fn every_report_of_sharded_training_has_its_tests() {
    let rows = table("Public reports of sharded training");
    assert!(rows.len() >= 14 && rows.iter().all(|row| row[0].contains("](https://github.com/")), "{rows:?}");
    assert_checked("Public reports of sharded training");
}

#[test]
fn the_check_can_fail() {
    let row = |tests: &str, place: &str| check(&["1", "what", tests, place].map(str::to_owned));
    row("`cases::the_check_can_fail`", "CPU").unwrap();
    row("not yet: nobody has thought of it", "nowhere yet").unwrap();
    for (tests, place) in [
        ("`cases::no_such_test`", "CPU"),
        ("`no_such_file::the_check_can_fail`", "CPU"),
        ("`cases::check`", "CPU"),
        ("`cases::the_check_can_fail`", "GPU"),
        ("`ui/fail/no-such-file.rs`", "compiler"),
        ("soon", "nowhere yet"),
        ("`cases::the_check_can_fail`", "somewhere"),
    ] {
        assert!(row(tests, place).is_err(), "{tests} on {place}");
    }
}
