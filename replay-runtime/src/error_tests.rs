//! Every error's text against the stored one, `tests/messages.txt`: what a user reads, side by side.
//!
//! `REPLAY_BLESS=1 cargo test --lib` writes it anew; read the difference before keeping it.

use std::fmt::Write as _;
use std::{env, fs};

use super::*;
use crate::state::OutputRecord;

struct Example {
    variant: &'static str,
    /// The fields as written below.
    fields: &'static str,
    error: ReplayError,
}

/// ```text
/// Input:   Used [{ block: pump() }] ..
/// Output:  the examples, and a `match` without a wildcard: it does not compile with a variant that has no example
/// ```
macro_rules! examples {
    ($($variant:ident [$($fields:tt)+])+) => {
        fn examples() -> Vec<Example> {
            vec![$($(Example {
                variant: stringify!($variant),
                fields: stringify!($fields),
                error: ReplayError::$variant $fields,
            }),+),+]
        }

        fn variant(error: &ReplayError) -> &'static str {
            match error {
                $(ReplayError::$variant { .. } => stringify!($variant)),+
            }
        }
    };
}

examples! {
    Block [
        { block: pump(), pass: Pass::Forward, source: "the pump is dry".into() }
        { block: pump(), pass: Pass::Replay, source: Box::new(tch::TchError::Torch(with_frames())) }
    ]
    Context [{ block: pump(), pass: Pass::Replay, source: "the cache is empty".into() }]
    NoInput [{ block: pump() }]
    UndefinedInput [{ block: pump(), input: flow() }]
    UndefinedOutput [{ block: pump(), output: 0 }]
    NoStep [{ block: pump() }]
    NoSlot [{ block: pump() }]
    States [{ block: pump(), step: 2, expected: 1, found: 3 }]
    Segments [{ block: pump(), segments: 5, layers: 3 }]
    InferenceInput [{ block: pump(), input: flow() }]
    Device [
        { block: pump(), tensor: "input `flow`".to_owned(), found: "Cuda(1)".to_owned(), expected: "Cuda(0)".to_owned() }
        { block: pump(), tensor: "output 0".to_owned(), found: "Mps".to_owned(), expected: "Cpu or Cuda".to_owned() }
    ]
    InputWritten [{ block: pump(), input: flow() }]
    VariableWritten [{ block: pump(), variable: weight(), what: "values" }]
    BufferWritten [{ block: pump(), variable: weight() }]
    VariableAdded [{ block: pump() }]
    Escaped [{ block: pump(), input: flow() }]
    VariableShared [{ shape: vec![512, 512] }]
    AccumulateKind [{ variable: weight(), found: tch::Kind::Double, kind: tch::Kind::Float }]
    Captured [{ block: pump(), operation: "ExpBackward0".to_owned() }]
    InputChanged [{ block: pump(), input: flow() }]
    VariableChanged [{ block: pump(), variable: weight(), what: "values" }]
    RandomWithoutState [{ block: pump() }]
    UnknownDevice [{ block: pump(), device: "Cuda(0)".to_owned() }]
    InPlace [{ block: pump() }]
    RngDiverged [{ block: pump(), device: "Cpu".to_owned() }]
    GraphMismatch [
        { block: pump(), what: "its graph saves 3 tensors instead of 4".to_owned() }
    ]
    OutputMismatch [
        { block: pump(), what: "output 0".to_owned(), expected: output(5), found: output(4) }
        { block: pump(), what: "number of outputs".to_owned(), expected: "2".to_owned(), found: "3".to_owned() }
    ]
    ValuesDiffer [
        { block: pump(), output: 1, difference: 3e-7 }
        { block: pump(), output: 0, difference: f64::NAN }
    ]
    LossNotScalar [{ shape: vec![5, 6] }]
    LossNotReal [{ kind: tch::Kind::Int64 }]
    LossWithoutGrad [{}]
    Inference [{}]
    OtherRollout [{ message: refusal("kOtherRollout") }]
    ForeignBackward [{ message: refusal("kForeignBackward") }]
    Used [{ block: pump() }]
    LeftAside [{ message: left_aside() }]
    Thread [{ message: refusal("kThread") }]
    Dist [{ source: Box::new(DistError::NoStore { world: 2 }) }]
    Backward [{ source: tch::TchError::Torch(with_frames()).into() }]
    Torch [{ block: pump(), action: "save an input", source: tch::TchError::Torch(with_frames()).into() }]
    Version [{ found: "2.11.0".to_owned(), expected: "2.13" }]
    Cuda [{ reason: "no usable GPU was found".to_owned(), remedy: "check the driver with `nvidia-smi`" }]
}

fn pump() -> String {
    "pump".to_owned()
}

fn flow() -> String {
    "flow".to_owned()
}

fn weight() -> String {
    "layers.0.weight".to_owned()
}

fn output(rows: i64) -> String {
    OutputRecord::of(&tch::Tensor::zeros([rows, 6], (tch::Kind::Float, tch::Device::Cpu))).to_string()
}

/// As LibTorch reports: its first line, then the C++ stack.
fn with_frames() -> String {
    let first = "mat1 and mat2 shapes cannot be multiplied (5x6 and 5x6)";
    format!(
        "{first}\nException raised from meta at LinearAlgebra.cpp:195 (most recent call first):\nframe #0: c10::Error"
    )
}

/// The text that the node refuses with, out of its source.
fn refusal(code: &str) -> String {
    let source = include_str!("../cpp/node.cpp");
    let arguments = source.split("refuse(").map(str::trim_start).find(|rest| rest.starts_with(code));
    let text = arguments.and_then(|rest| rest.split('"').nth(1)).expect("one literal after the code");
    format!("replay block `pump`: {text}").replace("\\n", "\n")
}

/// The text of the hook on a replay's leaf, out of its source: two literals around the block's name.
fn left_aside() -> String {
    let source = include_str!("../cpp/hooks.h").split("kEscaped,").nth(1).expect("the refusal");
    let literals: Vec<_> = source.split('"').collect();
    format!("{}pump{}", literals[1], literals[3]).replace("\\n", "\n")
}

const WIDTH: usize = 160;
/// What a message may start with beside a small letter.
const NAMES: [&str; 2] = ["LibTorch ", "CUDA "];

/// What is wrong with the text, against the promise of this module.
fn faults(example: &Example) -> Vec<String> {
    let text = example.error.to_string();
    let mut faults = Vec::new();
    let mut demand = |holds: bool, fault: &str| {
        if !holds {
            faults.push(format!("{} {fault}: {text}", example.variant));
        }
    };
    demand((1..=2).contains(&text.lines().count()), "has not one or two lines");
    demand(text.lines().all(|line| line.chars().count() <= WIDTH), "is too wide");
    demand(text.lines().all(|line| line == line.trim() && !line.is_empty()), "has space around a line");
    demand(!text.ends_with(['.', '!']), "ends in a full stop");
    demand(
        !["frame #", "Exception raised", "most recent call"].iter().any(|sign| text.contains(sign)),
        "has C++ frames",
    );
    let small = text.starts_with(|first: char| first.is_lowercase());
    demand(small || NAMES.iter().any(|name| text.starts_with(name)), "starts with a capital");
    let named = [("block", pump()), ("input", flow()), ("variable", weight()), ("message", pump())];
    for (field, name) in named {
        let has_field = example.fields.contains(&format!("{field}:"));
        demand(!has_field || text.contains(&format!("`{name}`")), &format!("does not name its {field}"));
    }
    faults
}

#[test]
fn every_message_is_short_and_says_whom_it_is_about() {
    let faults: Vec<_> = examples().iter().flat_map(faults).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_message_is_the_stored_one() {
    let mut found = String::new();
    for example in examples() {
        assert_eq!(variant(&example.error), example.variant);
        let text = example.error.to_string().replace('\n', "\n    ");
        let gap = if found.is_empty() { "" } else { "\n" };
        writeln!(found, "{gap}{}\n    {text}", example.variant).unwrap();
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/messages.txt");
    if env::var_os("REPLAY_BLESS").is_some() {
        fs::write(path, &found).unwrap();
    }
    assert!(found == fs::read_to_string(path).unwrap(), "now:\n{found}");
}

/// The stack is not lost: it is in `Debug`, and in the source's own.
#[test]
fn what_a_message_leaves_out_is_in_its_debug_text() {
    for example in examples().iter().filter(|example| example.fields.contains("with_frames")) {
        assert!(format!("{:?}", example.error).contains("frame #0"), "{}", example.variant);
    }
}

/// A user's own error is told in two lines at most, and the rest of it is the source.
#[test]
fn a_long_error_of_a_body_is_cut() {
    let source = "first\nsecond\nthird".into();
    let error = ReplayError::Block { block: pump(), pass: Pass::Forward, source };
    assert_eq!(error.to_string(), "replay block `pump` returned an error in its forward: first\nsecond");
    assert_eq!(error.source().unwrap().to_string(), "first\nsecond\nthird");
}
