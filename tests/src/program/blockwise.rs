//! The reference for real numbers: autograd taken block by block, written down without the runtime.
//!
//! Each block without blocks inside is differentiated by LibTorch on detached inputs, and so is each single operation
//! around blocks; what arrives at a tensor is added up here, in the order in which LibTorch's engine would: it visits
//! what was made last first, and adds to a parameter's gradient when all uses in one graph have arrived. A block around
//! others has a graph of its own, which is treated likewise.

use std::collections::BTreeMap;
use std::sync::Arc;

use replay_runtime::AutocastGuard;
use tch::{Device, Kind, Tensor};

use super::fault::Fault;
use super::world::{Fresh, World, draw, is_complex};
use super::{Block, Op, Output, Program, Step};
use crate::{Outcome, add, leaf};

/// What a program gives.
pub(super) fn outcome(program: &Program) -> Outcome {
    let fresh = Fresh::new(program, Fault::new(None));
    let world = &fresh.world;
    let mut grads: BTreeMap<_, _> = fresh
        .trained
        .iter()
        .map(|(name, tensor)| (name.clone(), Some(tensor.grad()).filter(Tensor::defined).map(|grad| grad.copy())))
        .collect();
    let mut loss = Tensor::new();
    for round in 0..program.rollouts {
        program.start_round(world, round);
        let mut graph = Graph::new(&fresh.leaves);
        for step in &program.steps {
            graph.step(world, step);
        }
        let chosen = program.loss_of(graph.env.len());
        let inputs: Vec<_> = chosen.into_iter().map(|i| graph.env[i]).collect();
        let at = graph.op(&inputs, &[], |leaves| world.loss(leaves));
        loss = graph.values[at].detach();
        let mut sums: Vec<Option<Tensor>> = world.params.iter().map(|_| None).collect();
        let seeds = vec![(at, loss.ones_like())];
        let arrived =
            if graph.values[at].requires_grad() { graph.backward(world, seeds, &mut sums) } else { Vec::new() };
        for (i, sum) in sums.iter().enumerate().filter_map(|(i, sum)| Some((i, sum.as_ref()?))) {
            // All names of a tied parameter show its gradient.
            for name in (0..sums.len()).filter(|&other| world.param_index(other) == i) {
                add(grads.get_mut(&format!("param {name}")).expect("each has an entry"), sum);
            }
        }
        for (i, grad) in arrived.iter().take(fresh.leaves.len()).enumerate() {
            if let Some(grad) = grad.as_ref().filter(|_| fresh.leaves[i].requires_grad()) {
                add(grads.get_mut(&format!("leaf {i}")).expect("each has an entry"), grad);
            }
        }
    }
    grads.insert("random stream".to_owned(), Some(draw()));
    grads.insert("buffer".to_owned(), Some(world.clock.copy()));
    Outcome { loss, grads }
}

/// A graph: a program's, or that of a block around others.
struct Graph {
    /// Detached, each with its own `requires_grad`.
    values: Vec<Tensor>,
    /// Where the tensors that steps refer to are among the values.
    env: Vec<usize>,
    segments: Vec<Segment>,
}

/// A block or an operation.
struct Segment {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    /// The parameters that the graph around blocks uses here.
    params: Vec<usize>,
    kind: SegmentKind,
}

enum SegmentKind {
    Operation {
        leaves: Vec<Tensor>,
        outputs: Vec<Tensor>,
    },
    Block {
        leaves: Vec<Tensor>,
        outputs: Vec<Tensor>,
    },
    /// A block around others: its graph, and which of its values it returns.
    Nest {
        graph: Graph,
        outputs: Vec<usize>,
    },
}

/// Gradients of a segment's inputs, and of all parameters.
type Found = (Vec<Option<Tensor>>, Vec<Option<Tensor>>);

impl Graph {
    fn new(inputs: &[Tensor]) -> Self {
        let values: Vec<_> = inputs.iter().map(leaf).collect();
        Self { env: (0..values.len()).collect(), values, segments: Vec::new() }
    }

    fn push(&mut self, segment: Segment, outputs: &[Tensor]) {
        self.segments.push(segment);
        self.values.extend(outputs.iter().map(leaf));
    }

    fn next_ids(&self, count: usize) -> Vec<usize> {
        (self.values.len()..self.values.len() + count).collect()
    }

    fn leaves(&self, inputs: &[usize]) -> Vec<Tensor> {
        inputs.iter().map(|&i| leaf(&self.values[i])).collect()
    }

    /// Runs an operation; the place of what it makes.
    fn op(&mut self, inputs: &[usize], params: &[usize], run: impl FnOnce(&[Tensor]) -> Tensor) -> usize {
        let leaves = self.leaves(inputs);
        let output = run(&leaves);
        let outputs = self.next_ids(1);
        let kind = SegmentKind::Operation { leaves, outputs: vec![output.shallow_clone()] };
        self.push(Segment { inputs: inputs.to_vec(), outputs, params: params.to_vec(), kind }, &[output]);
        self.values.len() - 1
    }

    fn step(&mut self, world: &World, step: &Step) {
        match step {
            Step::Op(op, a, b) => {
                let made = self.operation(world, *op, *a, *b);
                self.env.push(made);
            }
            Step::Block(block) => self.block(world, block),
        }
    }

    fn operation(&mut self, world: &World, op: Op, a: usize, b: usize) -> usize {
        let (a, b) = (self.env[a % self.env.len()], self.env[b % self.env.len()]);
        let params: Vec<_> = op.params().into_iter().map(|i| world.param_index(i)).collect();
        if !op.is_binary() || a == b {
            return self.op(&[a], &params, |leaves| world.apply(op, &leaves[0], &leaves[0].detach()));
        }
        self.op(&[a, b], &params, |leaves| world.apply(op, &leaves[0], &leaves[1]))
    }

    fn block(&mut self, world: &World, block: &Arc<Block>) {
        let inputs: Vec<_> = block.inputs.iter().map(|i| self.env[i % self.env.len()]).collect();
        let leaves = self.leaves(&inputs);
        let autocast = block.casts(world.numbers, world.kind);
        let guard = autocast.then(|| AutocastGuard::new(Device::Cpu, Kind::BFloat16));
        let (kind, made) = if block.nests() { nest(world, block, &leaves) } else { whole(world, block, leaves) };
        drop(guard);
        let outputs = self.next_ids(made.len());
        self.env.extend(&outputs);
        self.push(Segment { inputs, outputs, params: Vec::new(), kind }, &made);
        if block.changes_output() {
            let first = self.env.len() - made.len();
            self.env[first] = self.op(&[self.env[first]], &[], |leaves| {
                let mut output = &leaves[0] * 1.0;
                World::change(&mut output);
                output
            });
        }
    }

    /// Which segments the engine visits on its way from `roots`.
    fn reached(&self, roots: &[(usize, Tensor)]) -> Vec<bool> {
        let mut values = vec![false; self.values.len()];
        for (root, _) in roots {
            values[*root] = true;
        }
        let mut segments = vec![false; self.segments.len()];
        for (i, segment) in self.segments.iter().enumerate().rev() {
            let trained = |&&output: &&usize| self.values[output].requires_grad();
            segments[i] = segment.outputs.iter().filter(trained).any(|&output| values[output]);
            if segments[i] {
                segment.inputs.iter().for_each(|&input| values[input] = true);
            }
        }
        segments
    }

    /// The gradients of all values; those of parameters are added to `sums` as they come.
    fn backward(&self, world: &World, roots: Vec<(usize, Tensor)>, sums: &mut [Option<Tensor>]) -> Vec<Option<Tensor>> {
        let reached = self.reached(&roots);
        let mut grads: Vec<Option<Tensor>> = self.values.iter().map(|_| None).collect();
        for (root, grad) in roots {
            add(&mut grads[root], &grad);
        }
        // Uses of a parameter in this graph, until the last one has arrived.
        let mut waiting: Vec<Option<Tensor>> = sums.iter().map(|_| None).collect();
        for (i, segment) in self.segments.iter().enumerate().rev().filter(|&(i, _)| reached[i]) {
            let arrived: Vec<_> = segment.outputs.iter().map(|&output| grads[output].take()).collect();
            let own = if segment.is_block() { &mut *sums } else { &mut waiting };
            let (found, of_params) = segment.backward(world, arrived, own);
            for (&input, grad) in segment.inputs.iter().zip(found) {
                if let Some(grad) = grad {
                    add(&mut grads[input], &grad);
                }
            }
            for (param, grad) in of_params.iter().enumerate() {
                if let Some(grad) = grad {
                    add(&mut own[param], grad);
                }
            }
            for &param in &segment.params {
                let earlier = self.segments[..i].iter().zip(&reached);
                if !earlier.into_iter().any(|(other, &reached)| reached && other.params.contains(&param)) {
                    waiting[param].take().iter().for_each(|grad| add(&mut sums[param], grad));
                }
            }
        }
        grads
    }
}

impl Segment {
    fn is_block(&self) -> bool {
        !matches!(self.kind, SegmentKind::Operation { .. })
    }

    fn backward(&self, world: &World, arrived: Vec<Option<Tensor>>, sums: &mut [Option<Tensor>]) -> Found {
        match &self.kind {
            SegmentKind::Operation { leaves, outputs } | SegmentKind::Block { leaves, outputs } => {
                differentiate(world, leaves, outputs, arrived)
            }
            SegmentKind::Nest { graph, outputs } => {
                let roots = outputs.iter().zip(arrived).filter_map(|(&output, grad)| Some((output, grad?)));
                let roots: Vec<_> = roots.filter(|(output, _)| graph.values[*output].requires_grad()).collect();
                if roots.is_empty() {
                    return (Vec::new(), Vec::new());
                }
                let mut grads = graph.backward(world, roots, sums);
                grads.truncate(self.inputs.len());
                (grads, Vec::new())
            }
        }
    }
}

/// A block without others inside: one graph.
fn whole(world: &World, block: &Block, leaves: Vec<Tensor>) -> (SegmentKind, Vec<Tensor>) {
    let mut values: Vec<_> = leaves.iter().map(Tensor::shallow_clone).collect();
    for step in &block.steps {
        let Step::Op(op, a, b) = step else { unreachable!("it has no blocks inside") };
        let (a, b) = (a % values.len(), b % values.len());
        let second = if a == b { values[b].detach() } else { values[b].shallow_clone() };
        values.push(world.apply(*op, &values[a], &second));
    }
    let value = |output: &Output| &values[output.source(values.len())];
    let outputs: Vec<_> = block.outputs.iter().map(|output| world.output(output, value(output))).collect();
    let made = outputs.iter().map(Tensor::shallow_clone).collect();
    (SegmentKind::Block { leaves, outputs }, made)
}

/// A block around others: a graph of its own.
fn nest(world: &World, block: &Block, leaves: &[Tensor]) -> (SegmentKind, Vec<Tensor>) {
    let mut graph = Graph::new(leaves);
    for step in &block.steps {
        graph.step(world, step);
    }
    let mut outputs = Vec::new();
    for output in &block.outputs {
        let source = graph.env[output.source(graph.env.len())];
        outputs.push(match output {
            Output::Value(_) => source,
            Output::Param(i) => graph.op(&[], &[world.param_index(*i)], |_| world.output(output, &Tensor::new())),
            _ => graph.op(&[source], &[], |leaves| world.output(output, &leaves[0])),
        });
    }
    let made = outputs.iter().map(|&output| graph.values[output].shallow_clone()).collect();
    (SegmentKind::Nest { graph, outputs }, made)
}

/// The gradients of `leaves` and of the parameters, from those of `outputs`.
fn differentiate(world: &World, leaves: &[Tensor], outputs: &[Tensor], arrived: Vec<Option<Tensor>>) -> Found {
    let none = || (leaves.iter().map(|_| None).collect(), Vec::new());
    // Last output first: the engine begins with what was made last, and gives the outputs their gradients in order.
    let roots = outputs.iter().zip(arrived).rev().filter_map(|(output, grad)| Some((output, grad?)));
    let products = roots.filter(|(output, _)| output.requires_grad()).map(|(output, grad)| product(output, &grad));
    let products: Vec<_> = products.collect();
    if products.is_empty() {
        return none();
    }
    let params = world.params.iter().enumerate().filter(|&(i, _)| world.param_index(i) == i);
    let params: Vec<_> = params.filter(|(_, param)| param.requires_grad()).collect();
    let targets = leaves.iter().filter(|leaf| leaf.requires_grad()).chain(params.iter().map(|(_, param)| *param));
    let targets: Vec<_> = targets.collect();
    if targets.is_empty() {
        return none();
    }
    let mut grads = Tensor::run_backward(&products, &targets, true, false).into_iter();
    let mut next = || grads.next().filter(Tensor::defined);
    let of_leaves = leaves.iter().map(|leaf| if leaf.requires_grad() { next() } else { None }).collect();
    let mut of_params: Vec<Option<Tensor>> = world.params.iter().map(|_| None).collect();
    for (i, _) in params {
        of_params[i] = next();
    }
    (of_leaves, of_params)
}

/// A number whose gradient with respect to `output` is `grad`, to the last bit and with the same strides: kernels add in
/// the order of the elements in memory.
fn product(output: &Tensor, grad: &Tensor) -> Tensor {
    let dims: Vec<_> = (0i64..).zip(grad.size()).zip(grad.stride()).collect();
    // Where one number stands for all along a dimension, the gradient of a sum along it is such a tensor.
    let wide: Vec<_> =
        dims.iter().filter(|((_, size), stride)| *size > 1 && *stride == 0).map(|((dim, _), _)| *dim).collect();
    let grad = wide.iter().fold(grad.shallow_clone(), |grad, &dim| grad.narrow(dim, 0, 1));
    let output =
        if wide.is_empty() { output.shallow_clone() } else { output.sum_dim_intlist(&*wide, true, output.kind()) };
    // Row by row; the gradient of the permutation brings the strides back.
    let mut order = dims;
    order.sort_by_key(|&(_, stride)| std::cmp::Reverse(stride));
    let order: Vec<_> = order.into_iter().map(|((dim, _), _)| dim).collect();
    let (output, grad) = (output.permute(&*order), grad.permute(&*order));
    if is_complex(output.kind()) {
        return (output.resolve_conj().view_as_real() * grad.resolve_conj().view_as_real()).sum(None::<Kind>);
    }
    (output * grad).sum(None::<Kind>)
}
