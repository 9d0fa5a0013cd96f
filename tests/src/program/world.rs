//! A program's tensors: parameters, leaves, and their gradients.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use tch::{Device, Kind, Tensor, nn};

use super::fault::Fault;
use super::{Home, Layout, Leaf, Numbers, Param, Program};
use crate::{MODES, Outcome};

/// The store and everything else that lives as long as a rollout.
pub(super) struct Fresh {
    pub(super) vs: nn::VarStore,
    pub(super) world: World,
    pub(super) leaves: Vec<Tensor>,
    /// Everything that may get a gradient, by name.
    pub(super) trained: BTreeMap<String, Tensor>,
}

/// What the bodies of a program's blocks know.
pub(super) struct World {
    pub(super) numbers: Numbers,
    pub(super) kind: Kind,
    pub(super) shape: Vec<i64>,
    pub(super) weighted_loss: bool,
    pub(super) seed: i64,
    /// Whether blocks are marked `early_stop`.
    pub(super) early_stop: bool,
    pub(super) params: Vec<Tensor>,
    /// A buffer: one number.
    pub(super) clock: Tensor,
    pub(super) fault: Fault,
    /// What happened in this run, for the census.
    pub(super) seen: RefCell<BTreeSet<&'static str>>,
}

impl Fresh {
    /// The program's tensors, the same ones each time.
    pub(super) fn new(program: &Program, fault: Fault) -> Self {
        tch::set_num_threads(1);
        tch::manual_seed(program.seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let mut world = World {
            numbers: program.numbers,
            kind: program.kind,
            shape: program.shape.clone(),
            weighted_loss: program.weighted_loss,
            seed: program.seed,
            early_stop: MODES[program.mode].marked,
            params: Vec::new(),
            clock: vs.root().add("clock", Tensor::ones([1], (program.kind, Device::Cpu)), false),
            fault,
            seen: RefCell::default(),
        };
        for (i, param) in program.params.iter().enumerate() {
            let tensor = world.param(&vs.root(), i, param);
            world.params.push(tensor);
        }
        let leaves: Vec<_> = program.leaves.iter().map(|leaf| world.leaf(leaf)).collect();
        let trained = named("param", &world.params).chain(named("leaf", &leaves)).collect();
        let fresh = Self { vs, world, leaves, trained };
        if program.old_gradients {
            fresh.give_gradients();
        }
        fresh
    }

    fn give_gradients(&self) {
        for tensor in self.trained.values().filter(|tensor| tensor.requires_grad()) {
            World::total(&(tensor * self.world.random(&tensor.size(), 2))).backward();
        }
    }
}

fn named(prefix: &str, list: &[Tensor]) -> impl Iterator<Item = (String, Tensor)> {
    list.iter().enumerate().map(move |(i, tensor)| (format!("{prefix} {i}"), tensor.shallow_clone()))
}

impl Outcome {
    /// Loss, gradients, the buffer, and what the generator gives next.
    pub(super) fn of(loss: &Tensor, trained: &BTreeMap<String, Tensor>, world: &World) -> Self {
        let grad = |tensor: &Tensor| Some(tensor.grad()).filter(Tensor::defined).map(|grad| grad.copy());
        let mut grads: BTreeMap<_, _> = trained.iter().map(|(name, tensor)| (name.clone(), grad(tensor))).collect();
        grads.insert("random stream".to_owned(), Some(draw()));
        grads.insert("buffer".to_owned(), Some(world.clock.copy()));
        Self { loss: loss.detach(), grads }
    }
}

impl Program {
    /// Where a rollout starts: the generator, and the buffer.
    pub(super) fn start_round(&self, world: &World, round: usize) {
        tch::manual_seed(self.seed + 1000 + i64::try_from(round).unwrap_or(0));
        let _ = world.clock.shallow_clone().fill_(1.0);
    }
}

impl World {
    /// Random numbers of the family, up to `size`.
    fn random(&self, shape: &[i64], size: i64) -> Tensor {
        let part = || match self.numbers {
            Numbers::Exact => Tensor::randint_low(-size, size + 1, shape, (Kind::Double, Device::Cpu)),
            Numbers::Real => Tensor::randn(shape, (Kind::Double, Device::Cpu)) * 0.6,
        };
        if is_complex(self.kind) {
            Tensor::complex(&part(), &part()).to_kind(self.kind)
        } else {
            part().to_kind(self.kind)
        }
    }

    /// The size of a vector parameter.
    pub(super) fn width(&self) -> i64 {
        self.shape.last().copied().unwrap_or(1)
    }

    fn param(&self, path: &nn::Path<'_>, i: usize, param: &Param) -> Tensor {
        let name = format!("p{i}");
        let width = self.width();
        let shape = if param.matrix { vec![width, width] } else { vec![width] };
        match (param.home, self.params.first()) {
            (Home::Tied, Some(first)) => path.add(&name, first.shallow_clone(), true),
            (Home::Foreign, _) => self.random(&shape, 1).set_requires_grad(true),
            (Home::Frozen, _) => path.add(&name, self.random(&shape, 1), true).set_requires_grad(false),
            (Home::Store | Home::Tied, _) => path.add(&name, self.random(&shape, 1), true),
        }
    }

    fn leaf(&self, leaf: &Leaf) -> Tensor {
        let mut shape = self.shape.clone();
        let last = shape.len().wrapping_sub(1);
        let tensor = match leaf.layout {
            Layout::Index => return Tensor::randint(self.width(), [self.width()], (Kind::Int64, Device::Cpu)),
            Layout::Transposed if shape.len() > 1 => {
                shape.swap(last, last - 1);
                self.random(&shape, 2).transpose(-1, -2)
            }
            Layout::Expanded if !shape.is_empty() => {
                shape[0] = 1;
                self.random(&shape, 2).expand(&self.shape, false)
            }
            Layout::Sliced if !shape.is_empty() => {
                shape[0] += 1;
                self.random(&shape, 2).narrow(0, 1, self.shape[0])
            }
            _ => self.random(&shape, 2),
        };
        tensor.set_requires_grad(leaf.grad)
    }

    /// The index of the parameter that counts for number `i`: a tied one is the first.
    pub(super) fn param_index(&self, i: usize) -> usize {
        let i = i % self.params.len();
        let same = |other: &Tensor| other.data_ptr() == self.params[i].data_ptr();
        self.params.iter().position(same).unwrap_or(i)
    }

    /// A real number with a gradient for each element.
    pub(super) fn total(tensor: &Tensor) -> Tensor {
        if is_complex(tensor.kind()) {
            return tensor.real().sum(None::<Kind>) + tensor.imag().sum(None::<Kind>);
        }
        tensor.sum(tensor.kind())
    }

    /// Notes that something happened.
    pub(super) fn note(&self, what: &'static str) {
        self.seen.borrow_mut().insert(what);
    }
}

/// Whether numbers of the kind have an imaginary part.
pub(super) fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexFloat | Kind::ComplexDouble)
}

/// What the generator gives next.
pub(super) fn draw() -> Tensor {
    Tensor::rand([4], (Kind::Float, Device::Cpu))
}
