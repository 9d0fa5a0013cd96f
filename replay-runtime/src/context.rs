//! What a user's model needs around a block, beyond what the library restores by itself.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use crate::error::{Pass, ReplayError};
use crate::output::BoxError;

/// State that a block reads and that may have changed by the time it is replayed: a cache, a mode, a counter.
///
/// `#[replay_block(context = path)]` calls `path(self)` before the forward. The value it returns is a snapshot of
/// that state; it opens a scope around the forward and one around each replay. A scope ends when it is dropped,
/// which happens on errors and on unwind too. Blocks inside the block are replayed inside its scope as well, outermost
/// first.
///
/// ```no_run
/// # use std::cell::Cell;
/// use replay_runtime::{BoxError, ReplayContext};
///
/// struct Scale<'a> { cell: &'a Cell<f64>, forward: f64 }
/// struct Put<'a>(&'a Cell<f64>, f64);
/// impl Drop for Put<'_> { fn drop(&mut self) { self.0.set(self.1) } }
///
/// impl ReplayContext for Scale<'_> {
///     type Scope<'s> = Option<Put<'s>> where Self: 's;
///     fn forward(&self) -> Result<Self::Scope<'_>, BoxError> { Ok(None) }
///     fn replay(&self) -> Result<Self::Scope<'_>, BoxError> {
///         Ok(Some(Put(self.cell, self.cell.replace(self.forward))))
///     }
/// }
/// ```
pub trait ReplayContext {
    /// An open scope; dropping it closes it.
    type Scope<'s>
    where
        Self: 's;

    /// Whether there is nothing to open.
    #[doc(hidden)]
    const NONE: bool = false;

    /// Opens the scope of the forward.
    ///
    /// # Errors
    /// Whatever keeps it from being opened; the block then returns [`ReplayError::Context`].
    fn forward(&self) -> Result<Self::Scope<'_>, BoxError>;

    /// Opens the scope of a replay.
    ///
    /// # Errors
    /// Whatever keeps it from being opened; `backward` then returns [`ReplayError::Context`].
    fn replay(&self) -> Result<Self::Scope<'_>, BoxError>;
}

/// The context of a block that has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoContext;

impl ReplayContext for NoContext {
    type Scope<'s> = ();
    const NONE: bool = true;

    fn forward(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn replay(&self) -> Result<(), BoxError> {
        Ok(())
    }
}

/// A context whose type is forgotten, so that blocks with different ones fit into one table.
pub(crate) trait AnyContext {
    /// Runs `body` inside the scope of `pass`.
    fn within(&self, pass: Pass, body: &mut dyn FnMut()) -> Result<(), BoxError>;

    /// Whether there is nothing to open.
    fn is_none(&self) -> bool;
}

impl<C: ReplayContext> AnyContext for C {
    fn within(&self, pass: Pass, body: &mut dyn FnMut()) -> Result<(), BoxError> {
        let _scope = match pass {
            Pass::Forward => self.forward(),
            Pass::Replay => self.replay(),
        }?;
        body();
        Ok(())
    }

    fn is_none(&self) -> bool {
        C::NONE
    }
}

/// The contexts around a body, from the outermost block's to its own.
pub(crate) type Contexts<'m> = Vec<Rc<dyn AnyContext + 'm>>;

/// [`run_within`], and LibTorch's panic about a leaf that is changed in place becomes an error that names the block.
pub(crate) fn run_body<T>(
    contexts: &[Rc<dyn AnyContext + '_>],
    block: &str,
    pass: Pass,
    body: impl FnOnce() -> Result<T, BoxError>,
) -> Result<T, ReplayError> {
    const IN_PLACE: &str = "leaf Variable that requires grad is being used in an in-place operation";
    match catch_unwind(AssertUnwindSafe(|| run_within(contexts, block, pass, body))) {
        Ok(outcome) => outcome,
        Err(payload) if payload.downcast_ref::<String>().is_some_and(|text| text.contains(IN_PLACE)) => {
            Err(ReplayError::InPlace { block: block.to_owned() })
        }
        Err(payload) => resume_unwind(payload),
    }
}

/// Runs `body` inside the scopes of all `contexts`, and tells errors of a context from those of the body.
fn run_within<T>(
    contexts: &[Rc<dyn AnyContext + '_>],
    block: &str,
    pass: Pass,
    body: impl FnOnce() -> Result<T, BoxError>,
) -> Result<T, ReplayError> {
    let mut body = Some(body);
    let mut outcome = None;
    within_all(contexts, pass, &mut || outcome = body.take().map(|body| body()))
        .map_err(|source| ReplayError::Context { block: block.to_owned(), pass, source })?;
    outcome.expect("the body runs when every scope was opened").map_err(|source| ReplayError::Block {
        block: block.to_owned(),
        pass,
        source,
    })
}

fn within_all(contexts: &[Rc<dyn AnyContext + '_>], pass: Pass, body: &mut dyn FnMut()) -> Result<(), BoxError> {
    let Some((outer, inner)) = contexts.split_first() else {
        body();
        return Ok(());
    };
    let mut opened = Ok(());
    outer.within(pass, &mut || opened = within_all(inner, pass, body))?;
    opened
}

thread_local! {
    static REPLAYING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling code runs inside a replay, that is, not for the first time.
///
/// For loggers, counters and progress bars inside a block: count only where this is `false`.
#[must_use]
pub fn is_replaying() -> bool {
    REPLAYING.try_with(Cell::get).unwrap_or(false)
}

/// Sets what [`is_replaying`] says until it is dropped.
pub(crate) struct ReplayingGuard(bool);

impl ReplayingGuard {
    pub(crate) fn enter() -> Self {
        Self(REPLAYING.try_with(|flag| flag.replace(true)).unwrap_or(false))
    }
}

impl Drop for ReplayingGuard {
    fn drop(&mut self) {
        let _ = REPLAYING.try_with(|flag| flag.set(self.0));
    }
}
