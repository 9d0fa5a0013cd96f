//! What programs do, so that a generator that has lost a feature is noticed.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Kind, Tensor};

use super::world::{World, is_complex};
use super::{Block, Home, Numbers, Op, Output, Program, Step};

/// How many programs had what.
#[derive(Debug, Default)]
pub struct Census {
    /// All of them.
    pub programs: usize,
    /// Those with each feature.
    pub features: BTreeMap<&'static str, usize>,
}

impl Census {
    /// Adds what a program did.
    pub(super) fn add(&mut self, seen: BTreeSet<&'static str>) {
        self.programs += 1;
        for what in seen {
            *self.features.entry(what).or_default() += 1;
        }
    }
}

impl World {
    pub(super) fn note_if(&self, condition: bool, what: &'static str) {
        if condition {
            self.note(what);
        }
    }

    /// What there is to say of an operation, with as many blocks around it, counted from one.
    pub(super) fn note_op(&self, op: Op, depth: usize) {
        self.note_if(op.draws() && depth > 1, "random numbers in a block");
        self.note_if(op.draws() && depth == 1, "random numbers between blocks");
        self.note_if(op == Op::InPlace && depth > 1, "in place inside a body");
        self.note_if(op == Op::Tick, "buffers updated in a block");
        self.note_if(op == Op::Read, "buffers read");
        self.note_if(!op.params().is_empty() && depth == 1, "parameters outside of blocks");
    }

    /// What there is to say of a block that is given `inputs` out of `known` tensors.
    pub(super) fn note_block(&self, block: &Block, inputs: &[Tensor], known: usize, depth: usize) {
        let distinct: BTreeSet<_> = block.inputs.iter().map(|i| i % known).collect();
        self.note_if(distinct.len() < block.inputs.len(), "one tensor twice in a block");
        self.note_if(depth == 2, "blocks in blocks");
        self.note_if(depth == 3, "blocks in blocks in blocks");
        self.note_if(block.casts(self.numbers, self.kind), "autocast");
        self.note_if(block.outputs.len() > 1, "several outputs");
        for input in inputs {
            self.note_if(!input.is_contiguous(), "views as inputs");
            self.note_if(input.numel() == 0, "empty inputs");
            self.note_if(input.dim() == 0, "inputs without dimensions");
            self.note_if(input.kind() == Kind::Int64, "integer inputs");
            self.note_if(is_complex(input.kind()), "complex inputs");
            self.note_if(!input.requires_grad(), "inputs without grad");
            self.note_if(input.requires_grad() && input.is_leaf(), "leaves as inputs");
        }
        let values = inputs.len() + block.steps.len();
        for output in &block.outputs {
            match output {
                Output::Value(_) => self.note_if(output.source(values) < inputs.len(), "inputs as outputs"),
                Output::View(_) => self.note("views as outputs"),
                Output::Param(_) => self.note("parameters as outputs"),
                Output::Detached(_) => self.note("detached outputs"),
                Output::Indices(_) => self.note("integer outputs"),
                Output::Doubled(_) => {}
            }
        }
    }

    /// What there is to say of a program as a whole.
    pub(super) fn note_program(&self, program: &Program) {
        let has = |home| program.params.iter().any(|param| param.home == home);
        self.note_if(has(Home::Frozen), "frozen parameters");
        self.note_if(has(Home::Foreign), "trainable tensors of no store");
        self.note_if(program.params.iter().skip(1).any(|param| param.home == Home::Tied), "tied parameters");
        self.note_if(program.old_gradients, "old gradients");
        self.note_if(program.rollouts > 1, "several rollouts");
        self.note_if(matches!(program.kind, Kind::Half | Kind::BFloat16), "16-bit numbers");
        self.note_if(program.kind == Kind::Double, "64-bit numbers");
        self.note_if(is_complex(program.kind), "complex numbers");
        self.note_if(program.numbers == Numbers::Exact, "exact numbers");
        let uses = Uses::of(program);
        let outputs = || uses.outputs.iter().map(|value| uses.blocks.get(value).copied().unwrap_or(0));
        self.note_if(uses.blocks.values().any(|&blocks| blocks > 1), "one tensor in several blocks");
        self.note_if(outputs().any(|blocks| blocks > 0), "chains of blocks");
        self.note_if(outputs().any(|blocks| blocks > 1), "an output in several blocks");
        self.note_if(uses.outputs.iter().any(|output| !uses.used.contains(output)), "unused outputs");
    }
}

/// Who uses what, outside of blocks.
#[derive(Default)]
struct Uses {
    /// How many blocks are given a tensor.
    blocks: BTreeMap<usize, usize>,
    /// What blocks return.
    outputs: BTreeSet<usize>,
    /// What is used by anything.
    used: BTreeSet<usize>,
}

impl Uses {
    fn of(program: &Program) -> Self {
        let mut uses = Self::default();
        let mut known = program.leaves.len();
        for step in &program.steps {
            match step {
                Step::Op(op, a, b) => {
                    uses.used.insert(a % known);
                    uses.used.extend(op.is_binary().then_some(b % known));
                    known += 1;
                }
                Step::Block(block) => {
                    let inputs: BTreeSet<_> = block.inputs.iter().map(|i| i % known).collect();
                    for input in &inputs {
                        *uses.blocks.entry(*input).or_default() += 1;
                    }
                    uses.used.extend(inputs);
                    uses.outputs.extend(known..known + block.outputs.len());
                    known += block.outputs.len();
                }
            }
        }
        uses.used.extend(program.loss_of(known));
        uses
    }
}
