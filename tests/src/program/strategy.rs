//! How programs are drawn, and made smaller when one fails.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use tch::Kind;

use super::{Block, Failure, Home, Layout, Leaf, Numbers, Op, Output, Param, Program, Step, Way};

/// Any number of a tensor, a parameter or a block: it is taken modulo how many there are.
fn any_number() -> std::ops::Range<usize> {
    0..24
}

/// As [`any_number`] from the newest tensor on: often one of the newest, since what the loss does not depend on is not
/// replayed.
fn rather_new() -> BoxedStrategy<usize> {
    prop_oneof![2 => 0..2usize, 1 => any_number()].boxed()
}

/// Programs.
pub fn programs() -> BoxedStrategy<Program> {
    let values = (numbers(), shapes(), vec(params(), 1..=3), leaves());
    let body = (steps(3, 6), vec(rather_new(), 1..=3), any::<bool>());
    let around = (any::<bool>(), 1..=2usize, weighted(0.4, failures()), 0..1000i64, modes(), prop::bool::weighted(0.4));
    (values, body, around)
        .prop_map(|(values, body, around)| {
            let ((numbers, kind), shape, params, leaves) = values;
            let (steps, loss, weighted_loss) = body;
            let (old_gradients, rollouts, failure, seed, mode, compared) = around;
            let mut count = 0;
            let steps = numbered(&steps, &mut count);
            let failure = failure.map(|failure| Failure { block: failure.block % count.max(1), ..failure });
            Program {
                numbers,
                kind,
                shape,
                params,
                leaves,
                steps,
                loss,
                weighted_loss,
                old_gradients,
                rollouts,
                failure,
                seed,
                mode,
                compared,
            }
        })
        .boxed()
}

/// Modes; in most programs something keeps replays from ending early, so those in which they may are drawn more often.
fn modes() -> BoxedStrategy<usize> {
    prop_oneof![1 => Just(1), 1 => Just(4), 1 => 0..crate::MODES.len()].boxed()
}

/// Gives the blocks their numbers.
fn numbered(steps: &[Step], next: &mut usize) -> Vec<Step> {
    let number = |step: &Step| match step {
        Step::Op(..) => step.clone(),
        Step::Block(block) => {
            let id = *next;
            *next += 1;
            let steps = numbered(&block.steps, next);
            Step::Block(Arc::new(Block { id, steps, ..Block::clone(block) }))
        }
    };
    steps.iter().map(number).collect()
}

fn numbers() -> BoxedStrategy<(Numbers, Kind)> {
    let exact = prop_oneof![3 => Just(Kind::Double), 1 => Just(Kind::ComplexDouble)];
    let real = prop_oneof![
        5 => Just(Kind::Float),
        2 => Just(Kind::Double),
        2 => Just(Kind::BFloat16),
        2 => Just(Kind::Half),
        1 => Just(Kind::ComplexFloat),
        1 => Just(Kind::ComplexDouble),
    ];
    prop_oneof![
        2 => exact.prop_map(|kind| (Numbers::Exact, kind)),
        3 => real.prop_map(|kind| (Numbers::Real, kind)),
    ]
    .boxed()
}

fn shapes() -> BoxedStrategy<Vec<i64>> {
    prop_oneof![
        6 => (1..=4i64, 1..=5i64).prop_map(|(rows, width)| vec![rows, width]),
        2 => (1..=3i64, 1..=3i64, 2..=4i64).prop_map(|(a, b, width)| vec![a, b, width]),
        1 => (1..=6i64).prop_map(|width| vec![width]),
        1 => (1..=3i64).prop_map(|width| vec![0, width]),
        1 => Just(Vec::new()),
    ]
    .boxed()
}

fn params() -> BoxedStrategy<Param> {
    let home = prop_oneof![
        4 => Just(Home::Store),
        1 => Just(Home::Frozen),
        1 => Just(Home::Foreign),
        1 => Just(Home::Tied),
    ];
    (prop::bool::weighted(0.6), home).prop_map(|(matrix, home)| Param { matrix, home }).boxed()
}

fn leaves() -> BoxedStrategy<Vec<Leaf>> {
    let layout = prop_oneof![
        3 => Just(Layout::Dense),
        1 => Just(Layout::Transposed),
        1 => Just(Layout::Expanded),
        1 => Just(Layout::Sliced),
        1 => Just(Layout::Index),
    ];
    let leaf = (prop::bool::weighted(0.7), layout)
        .prop_map(|(grad, layout)| Leaf { grad: grad && layout != Layout::Index, layout });
    vec(leaf, 1..=4).boxed()
}

/// Steps with blocks up to so many deep.
fn steps(depth: u32, most: usize) -> BoxedStrategy<Vec<Step>> {
    let op = (ops(depth < 3), any_number(), any_number()).prop_map(|(op, a, b)| Step::Op(op, a, b));
    match depth {
        0 => vec(op, 1..=most).boxed(),
        3 => vec(prop_oneof![2 => op, 3 => blocks(depth)], 1..=most).boxed(),
        _ => vec(prop_oneof![4 => op, 1 => blocks(depth)], 1..=most).boxed(),
    }
}

fn blocks(depth: u32) -> BoxedStrategy<Step> {
    let inner = (vec(any_number(), 1..=3), steps(depth - 1, 4), vec(outputs(), 1..=3));
    (inner, prop::bool::weighted(0.3), any::<bool>())
        .prop_map(|((inputs, steps, outputs), autocast, change_output)| {
            Step::Block(Arc::new(Block { id: 0, inputs, steps, outputs, autocast, change_output }))
        })
        .boxed()
}

fn outputs() -> BoxedStrategy<Output> {
    prop_oneof![
        6 => rather_new().prop_map(Output::Value),
        4 => rather_new().prop_map(Output::Doubled),
        1 => rather_new().prop_map(Output::View),
        1 => any_number().prop_map(Output::Param),
        1 => rather_new().prop_map(Output::Detached),
        1 => any_number().prop_map(Output::Indices),
    ]
    .boxed()
}

/// Operations; those that change the buffer are for bodies of blocks.
fn ops(in_block: bool) -> BoxedStrategy<Op> {
    let with_param = prop_oneof![3 => any_number().prop_map(Op::Linear), 2 => any_number().prop_map(Op::Scale), 2 => any_number().prop_map(Op::Shift)];
    let one = prop::sample::select(vec![Op::Squash, Op::Curve, Op::Mix, Op::Norm, Op::InPlace, Op::NoGrad]);
    let drawing = prop::sample::select(vec![Op::Dropout, Op::Noise, Op::Normal, Op::Seeded]);
    let two = prop::sample::select(vec![Op::Add, Op::Mul, Op::Where, Op::Cat, Op::Gather]);
    let shape = prop::sample::select(vec![Op::Transpose, Op::Slice, Op::Expand, Op::Sum, Op::Argmax, Op::Detach]);
    let buffer = prop_oneof![1 => Just(Op::Read), 1 => Just(if in_block { Op::Tick } else { Op::Read })];
    prop_oneof![10 => with_param, 8 => one, 4 => drawing, 8 => two, 4 => shape, 3 => buffer].boxed()
}

fn failures() -> BoxedStrategy<Failure> {
    let way = prop::sample::select(vec![
        Way::Error,
        Way::TorchError,
        Way::PanicText,
        Way::PanicValue,
        Way::TorchPanic,
        Way::PanicWithoutGrad,
    ]);
    let run = prop_oneof![1 => Just(1), 2 => Just(2), 1 => 3..=5usize];
    (any_number(), run, way, any::<bool>(), any::<bool>())
        .prop_map(|(block, run, way, late, retry)| Failure { block, run, way, late, retry })
        .boxed()
}
