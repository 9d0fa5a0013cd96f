//! Failures on purpose: when they strike, and what must be as before afterwards.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, panic_any};
use std::sync::Once;

use replay_runtime::{BoxError, ReplayError, is_replaying};
use tch::{Device, Kind, Tensor};

use super::world::World;
use super::{Failure, Way};

const TEXT: &str = "the pump is dry";

/// A failure that waits for its block's run.
pub(super) struct Fault {
    failure: Option<Failure>,
    runs: Cell<usize>,
    struck: Cell<bool>,
}

/// Why a call failed.
pub(super) enum Broken {
    Error(ReplayError),
    Panic(Box<dyn Any + Send>),
}

impl Fault {
    pub(super) fn new(failure: Option<Failure>) -> Self {
        Self { failure, runs: Cell::new(0), struck: Cell::new(false) }
    }

    /// Whether it has struck; it does so once.
    pub(super) fn struck(&self) -> bool {
        self.struck.get()
    }

    /// Called by the body of each block before its steps, and after them: the way to fail now, if it is time.
    fn visit(&self, block: usize, late: bool) -> Option<Way> {
        let failure = self.failure.as_ref().filter(|failure| failure.block == block)?;
        if !late {
            self.runs.set(self.runs.get() + 1);
        }
        if self.struck() || self.runs.get() != failure.run || late != failure.late {
            return None;
        }
        self.struck.set(true);
        Some(failure.way)
    }

    /// Whether a call failed in the way that was asked for.
    pub(super) fn explains(&self, broken: &Broken) -> bool {
        let Some(failure) = &self.failure else { return false };
        if !self.struck() {
            return false;
        }
        match (failure.way, broken) {
            (Way::Error, Broken::Error(error)) => innermost(error).contains(TEXT),
            (Way::TorchError, Broken::Error(error)) => innermost(error).contains("cannot be multiplied"),
            (Way::PanicText | Way::PanicWithoutGrad, Broken::Panic(payload)) => {
                payload.downcast_ref::<String>().is_some_and(|text| text == TEXT)
            }
            (Way::PanicValue, Broken::Panic(payload)) => payload.downcast_ref() == Some(&41u32),
            (Way::TorchPanic, Broken::Panic(payload)) => {
                payload.downcast_ref::<String>().is_some_and(|text| text.contains("cannot be multiplied"))
            }
            _ => false,
        }
    }
}

impl World {
    /// Called by the body of each block, with `depth` blocks around its steps: fails if it is time.
    pub(super) fn strike(&self, block: usize, late: bool, depth: usize) -> Result<(), BoxError> {
        let Some(way) = self.fault.visit(block, late) else { return Ok(()) };
        if depth > 1 {
            self.note("failures inside of blocks in blocks");
        }
        way.strike()
    }
}

/// The text of the error that the failing body returned, through the blocks around it.
fn innermost(error: &ReplayError) -> String {
    match error {
        ReplayError::Block { source, .. } => match source.downcast_ref::<ReplayError>() {
            Some(inner) => innermost(inner),
            None => source.to_string(),
        },
        other => other.to_string(),
    }
}

impl Way {
    fn strike(self) -> Result<(), BoxError> {
        let misfit = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        match self {
            Self::Error => Err(TEXT.into()),
            Self::TorchError => Ok(misfit().f_matmul(&misfit()).map(drop)?),
            Self::PanicText => panic_any(TEXT.to_owned()),
            Self::PanicValue => panic_any(41u32),
            Self::TorchPanic => {
                drop(misfit().matmul(&misfit()));
                Ok(())
            }
            Self::PanicWithoutGrad => tch::no_grad(|| panic_any(TEXT.to_owned())),
        }
    }
}

impl Broken {
    /// For the report of a program that failed otherwise.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Error(error) => format!("error: {error:?}"),
            Self::Panic(payload) => format!("panic: {}", text(&**payload)),
        }
    }
}

thread_local! {
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs what may fail; a panic inside prints nothing.
pub(super) fn quietly<T, E>(run: impl FnOnce() -> Result<T, E>) -> Result<Result<T, E>, Box<dyn Any + Send>> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            if !EXPECTED.get() {
                before(info);
            }
        }));
    });
    let before = EXPECTED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(run));
    EXPECTED.set(before);
    outcome
}

/// Runs what may fail as a block may.
pub(super) fn attempt<T>(run: impl FnOnce() -> Result<T, ReplayError>) -> Result<T, Broken> {
    quietly(run).map_err(Broken::Panic)?.map_err(Broken::Error)
}

/// What a panic says, without the frames that LibTorch adds.
pub(super) fn text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("something else than a text");
    text.split("\\nException raised").next().unwrap_or_default().to_owned()
}

/// What of the thread is not as a fresh thread has it.
pub(super) fn disturbed_modes() -> Option<&'static str> {
    let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let y = x.matmul(&x);
    if !y.requires_grad() {
        Some("grad mode was left off")
    } else if y.kind() != Kind::Float {
        Some("autocast was left on")
    } else if is_replaying() {
        Some("the thread says that it is replaying")
    } else {
        None
    }
}
