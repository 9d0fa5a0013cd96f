//! What the configurations are written with: a run that takes what a file gives, notes what comes out, and compares it
//! with what the file holds. The counterpart of `tests/parity/run.py`.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use replay_runtime::{AutocastGuard, ReplayError, Rollout};
use tch::{Device, Kind, Tensor, nn};

/// The folder of all files.
pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("parity/data")
}

/// One side of a configuration: tensors by name.
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// Runs a configuration and demands the reference's results.
pub(crate) fn check<M>(
    name: &str,
    build: impl FnOnce(&nn::Path<'_>) -> M,
    program: impl for<'m> FnOnce(&Rollout<'m>, &'m M, &Run) -> Result<(), ReplayError>,
) {
    let case = Case::new(name, build);
    case.replay(program).unwrap();
    case.assert_equals("reference");
}

/// Runs a configuration on which the reference and plain autograd disagree, and demands the results of the latter.
pub(crate) fn check_differs<M>(
    name: &str,
    build: impl FnOnce(&nn::Path<'_>) -> M,
    program: impl for<'m> FnOnce(&Rollout<'m>, &'m M, &Run) -> Result<(), ReplayError>,
) {
    let case = Case::new(name, build);
    case.replay(program).unwrap();
    case.assert_equals("plain");
    case.assert_differs("reference");
}

/// A configuration with its model.
pub(crate) struct Case<M> {
    pub(crate) vs: nn::VarStore,
    pub(crate) model: M,
    pub(crate) run: Run,
}

impl<M> Case<M> {
    /// Reads the file of that name and gives the model's variables the values and old gradients in it.
    pub(crate) fn new(name: &str, build: impl FnOnce(&nn::Path<'_>) -> M) -> Self {
        tch::set_num_threads(1);
        let run = Run::new(name);
        let vs = nn::VarStore::new(Device::Cpu);
        let model = build(&vs.root());
        for (name, mut variable) in vs.variables() {
            let values = run.given(&format!("variable.{name}"));
            assert_eq!(variable.size(), values.size(), "variable {name}");
            variable.set_data(&values);
            if let Some(old) = run.find(&format!("old.{name}")) {
                (&variable * old).sum(variable.kind()).backward();
            }
        }
        Self { vs, model, run }
    }

    /// Runs a program in a rollout, and differentiates what it has noted as outputs.
    pub(crate) fn replay(
        &self,
        program: impl for<'m> FnOnce(&Rollout<'m>, &'m M, &Run) -> Result<(), ReplayError>,
    ) -> Result<(), ReplayError> {
        let rollout = Rollout::new(&self.vs);
        program(&rollout, &self.model, &self.run)?;
        rollout.backward(&self.run.take_loss()).map(drop)
    }

    /// All results by name; a gradient that never arrived is not among them.
    pub(crate) fn results(&self) -> Tensors {
        let mut results = handles(&self.run.results.borrow());
        results.insert("loss".to_owned(), Tensor::stack(&self.run.losses.borrow(), 0));
        let variables = self.vs.variables().into_iter().map(|(name, leaf)| (format!("grad.variable.{name}"), leaf));
        let leaves = handles(&self.run.leaves.borrow()).into_iter();
        let leaves = leaves.map(|(name, leaf)| (format!("grad.input.{name}"), leaf));
        let grads = variables.chain(leaves).map(|(name, leaf)| (name, leaf.grad()));
        results.extend(grads.filter(|(_, grad)| grad.defined()));
        results
    }

    /// Demands that results and one side of the file have the same names and values, and that all that is given was
    /// used.
    pub(crate) fn assert_equals(&self, side: &str) {
        let run = &self.run;
        assert_eq!(run.unread(), Vec::<String>::new(), "given for {}, but not used", run.name);
        let (expected, found) = (run.side(side), self.results());
        let names = |side: &Tensors| side.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&expected), names(&found), "results of {}", run.name);
        for (name, expected) in &expected {
            let ratio = ratio(expected, &found[name]);
            println!("{} {:?} {name}: {ratio:e}", run.name, expected.kind());
            let (tolerance, found) = (run.tolerance(expected.kind()), &found[name]);
            assert!(
                ratio <= tolerance,
                "{name} of {}: {ratio:e} of the largest value apart, allowed are {tolerance:e}\n{expected}\n{found}",
                run.name,
            );
        }
    }

    /// Demands that results differ from one side of the file, in names or in values.
    pub(crate) fn assert_differs(&self, side: &str) {
        let (expected, found) = (self.run.side(side), self.results());
        let same = |name: &String| {
            let (expected, found) = (expected.get(name), found.get(name));
            expected.zip(found).is_some_and(|(a, b)| ratio(a, b) <= self.run.tolerance(a.kind()))
        };
        let same = expected.keys().chain(found.keys()).all(same);
        assert!(!same, "{} does not differ from {side} any more", self.run.name);
    }
}

/// The largest difference over the largest value.
fn ratio(expected: &Tensor, found: &Tensor) -> f64 {
    assert_eq!((expected.size(), expected.kind()), (found.size(), found.kind()));
    if expected.numel() == 0 {
        return 0.0;
    }
    let (expected, found) = (expected.to_kind(Kind::Double), found.detach().to_kind(Kind::Double));
    let largest = |tensor: Tensor| tensor.abs().max().double_value(&[]);
    let difference = largest(&expected - found);
    if difference == 0.0 { 0.0 } else { difference / largest(expected) }
}

/// What a program takes from a file and gives back.
pub(crate) struct Run {
    name: String,
    file: Tensors,
    read: RefCell<BTreeSet<String>>,
    leaves: RefCell<Tensors>,
    results: RefCell<Tensors>,
    loss: RefCell<Option<Tensor>>,
    losses: RefCell<Vec<Tensor>>,
    bfloat16: Cell<bool>,
}

impl Run {
    fn new(name: &str) -> Self {
        let path = folder().join(name).with_extension("safetensors");
        let file = Tensor::read_safetensors(path).expect("a file of the configuration's name");
        Self {
            name: name.to_owned(),
            file: file.into_iter().collect(),
            read: RefCell::default(),
            leaves: RefCell::default(),
            results: RefCell::default(),
            loss: RefCell::default(),
            losses: RefCell::default(),
            bfloat16: Cell::default(),
        }
    }

    /// An input that gets no gradient.
    pub(crate) fn input(&self, name: &str) -> Tensor {
        self.given(&format!("input.{name}"))
    }

    /// An input that gets a gradient.
    pub(crate) fn leaf(&self, name: &str) -> Tensor {
        let leaf = self.input(name).set_requires_grad(true);
        self.leaves.borrow_mut().insert(name.to_owned(), leaf.shallow_clone());
        leaf
    }

    /// Seeds the default generator, from which blocks draw.
    pub(crate) fn seed(&self) {
        tch::manual_seed(self.given("seed").int64_value(&[]));
    }

    /// Autocast, after which a 16-bit type's precision is all that can be demanded.
    pub(crate) fn autocast(&self) -> AutocastGuard {
        self.bfloat16.set(true);
        AutocastGuard::new(Device::Cpu, Kind::BFloat16)
    }

    /// Notes an output. If the file has weights for it, its weighted squares are part of the loss.
    pub(crate) fn output(&self, name: &str, tensor: &Tensor) {
        let mut results = self.results.borrow_mut();
        results.insert(format!("output.{name}"), tensor.detach().copy());
        results.insert(format!("requires_grad.{name}"), Tensor::from(tensor.requires_grad()));
        if let Some(weight) = self.find(&format!("weight.{name}")) {
            let part = (tensor.square() * weight).sum(None::<Kind>);
            let mut loss = self.loss.borrow_mut();
            *loss = Some(loss.take().map_or_else(|| part.shallow_clone(), |loss| loss + &part));
        }
    }

    /// The sum of the outputs that were noted since the last time.
    pub(crate) fn take_loss(&self) -> Tensor {
        let loss = self.loss.take().expect("an output with weights");
        self.losses.borrow_mut().push(loss.detach());
        loss
    }

    /// A tensor that the file gives.
    pub(crate) fn given(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("{} gives no {name}", self.name))
    }

    /// A tensor that the file may give.
    fn find(&self, name: &str) -> Option<Tensor> {
        let name = format!("given.{name}");
        let tensor = self.file.get(&name)?.copy();
        self.read.borrow_mut().insert(name);
        Some(tensor)
    }

    fn unread(&self) -> Vec<String> {
        let read = self.read.borrow();
        self.file.keys().filter(|name| name.starts_with("given.") && !read.contains(*name)).cloned().collect()
    }

    /// The results of one side.
    fn side(&self, side: &str) -> Tensors {
        let of_side = |(name, tensor): (&String, &Tensor)| {
            Some((name.strip_prefix(side)?.strip_prefix('.')?.to_owned(), tensor.shallow_clone()))
        };
        self.file.iter().filter_map(of_side).collect()
    }

    /// How far apart values of a kind may be, by the smallest type that was computed in.
    fn tolerance(&self, kind: Kind) -> f64 {
        let float = self.file.values().any(|tensor| tensor.kind() == Kind::Float);
        match kind {
            Kind::Int64 | Kind::Bool => 0.0,
            _ if self.bfloat16.get() => 2f64.powi(-6),
            _ if float => 1e-5,
            _ => 1e-12,
        }
    }
}

/// Further handles of the same tensors.
fn handles(tensors: &Tensors) -> Tensors {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
}
