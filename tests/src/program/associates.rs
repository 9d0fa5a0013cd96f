//! Where plain autograd adds in the same order as a rollout.
//!
//! Both visit what was made last first. Plain autograd adds what arrives at a tensor one by one; a block adds what
//! arrives inside it first. So they agree where each block uses each of its inputs and each parameter once at most, a
//! parameter is used once at most outside of blocks, and no tensor goes into a block twice.

use std::collections::HashMap;

use super::{Block, Numbers, Output, Program, Step};

/// Whether plain autograd must give the program's bits.
pub(super) fn associates(program: &Program) -> bool {
    if program.numbers == Numbers::Exact {
        return true;
    }
    let count = program.params.len();
    // Tied ones are the first parameter's.
    let param = |i: usize| if program.params[i % count].home == super::Home::Tied { 0 } else { i % count };
    let mut around = HashMap::new();
    let mut known = program.leaves.len();
    for step in &program.steps {
        match step {
            Step::Op(op, ..) => {
                op.params().into_iter().for_each(|i| *around.entry(param(i)).or_insert(0) += 1);
                known += 1;
            }
            Step::Block(block) => {
                if !uses_all_once(block, known, param) || block.casts(program.numbers, program.kind) {
                    return false;
                }
                known += block.outputs.len();
            }
        }
    }
    around.values().all(|&uses| uses < 2)
}

fn uses_all_once(block: &Block, known: usize, param: impl Fn(usize) -> usize) -> bool {
    let inputs = block.inputs.len();
    let mut values = vec![0; inputs];
    let mut params = HashMap::new();
    let mut slots = HashMap::new();
    for input in &block.inputs {
        *slots.entry(input % known).or_insert(0) += 1;
    }
    let mut returned = HashMap::new();
    let mut count = inputs;
    let mut use_value = |i: usize, count: usize| {
        if i % count < inputs {
            values[i % count] += 1;
        }
    };
    for step in &block.steps {
        let Step::Op(op, a, b) = step else { return false };
        use_value(*a, count);
        if op.is_binary() && a % count != b % count {
            use_value(*b, count);
        }
        op.params().into_iter().for_each(|i| *params.entry(param(i)).or_insert(0) += 1);
        count += 1;
    }
    for output in &block.outputs {
        let source = output.source(count);
        match output {
            // What comes after the block adds to such an output first.
            Output::Param(i) => *params.entry(param(*i)).or_insert(0) += 2,
            Output::Value(_) | Output::View(_) => {
                use_value(source, count);
                use_value(source, count);
                *returned.entry(source).or_insert(0) += i32::from(matches!(output, Output::Value(_)));
            }
            Output::Doubled(_) => use_value(source, count),
            Output::Detached(_) | Output::Indices(_) => {}
        }
    }
    let once = |uses: &i32| *uses < 2;
    values.iter().all(once) && [&params, &slots, &returned].iter().all(|uses| uses.values().all(once))
}
