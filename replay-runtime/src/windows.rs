//! Windows on the units of sharded stores: their parameters are whole while a block of theirs runs, or is differentiated.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};

use tch::Kind;

use crate::dist::DistError;
use crate::error::ReplayError;
use crate::state::Label;
use crate::store::{Shards, Store};

fn dist(source: DistError) -> ReplayError {
    ReplayError::Dist { source: Box::new(source) }
}

/// Those of one rollout.
#[derive(Default)]
pub(crate) struct Windows<'m> {
    store: Option<&'m dyn Shards>,
    /// The resident unit could not be opened.
    failed: RefCell<Option<DistError>>,
    resident: Cell<bool>,
    /// The parameters' versions when the rollout began.
    versions: OnceCell<Vec<u64>>,
    /// The units of blocks that will be replayed, by entry.
    expected: RefCell<BTreeMap<u64, usize>>,
    /// The windows of blocks that have been replayed and are being differentiated, by entry.
    replayed: RefCell<HashMap<u64, usize>>,
}

/// The unit's parameters are whole until it is dropped.
#[must_use = "the window closes when it is dropped"]
pub(crate) struct Window<'w> {
    store: &'w dyn Shards,
    unit: usize,
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        self.store.close(self.unit);
    }
}

/// A backward pass over a store is under way until it is dropped.
pub(crate) struct PassOver<'m>(Option<&'m dyn Shards>);

impl Drop for PassOver<'_> {
    fn drop(&mut self) {
        if let Some(store) = self.0 {
            store.end_pass();
        }
    }
}

impl<'m> Windows<'m> {
    /// Opens the resident unit; a failure is told at the first occasion.
    pub(crate) fn new(stores: &[&'m dyn Store], accumulate: Option<Kind>) -> Self {
        let store = stores.iter().find_map(|store| store.shards());
        let windows = Self { store, ..Self::default() };
        if let Some(store) = store {
            let several = stores.iter().filter(|store| store.shards().is_some()).count() > 1;
            let outcome = match (several, accumulate) {
                (true, _) => Err(DistError::SecondStore),
                (_, Some(_)) => Err(DistError::AccumulateIn),
                (false, None) => windows.begin(store),
            };
            *windows.failed.borrow_mut() = outcome.err();
        }
        windows
    }

    fn begin(&self, store: &dyn Shards) -> Result<(), DistError> {
        store.open(store.resident())?;
        self.resident.set(true);
        let _ = self.versions.set(store.versions()?);
        Ok(())
    }

    /// Whether there is a sharded store.
    pub(crate) fn any(&self) -> bool {
        self.store.is_some()
    }

    /// The unit whose window a block opens.
    pub(crate) fn unit(&self, label: &Label) -> Option<usize> {
        label.unit.as_ref().zip(self.store).and_then(|(key, store)| store.unit(key))
    }

    /// Begins the rollout's backward pass: one at a time over a store, which adds up gradients.
    pub(crate) fn begin_pass(&self) -> Result<PassOver<'m>, ReplayError> {
        let pass = PassOver(self.store);
        if self.store.is_none_or(Shards::begin_pass) {
            return Ok(pass);
        }
        // It is the other one's to end.
        std::mem::forget(pass);
        Err(dist(DistError::Nested))
    }

    /// Whether it is a parameter of an open unit.
    ///
    /// # Errors
    /// If it is one of a unit that is not open.
    pub(crate) fn is_whole(&self, identity: usize) -> Result<bool, ReplayError> {
        self.store.map_or(Ok(false), |store| store.is_whole(identity)).map_err(dist)
    }

    /// Why the rollout cannot begin.
    pub(crate) fn check_begun(&self) -> Result<(), ReplayError> {
        match self.failed.take() {
            Some(source) => Err(dist(source)),
            None => Ok(()),
        }
    }

    /// Opens the window of a block that is about to run, if it has a unit. Nobody may have changed a parameter since the
    /// rollout began.
    pub(crate) fn open(&self, label: &Label) -> Result<Option<Window<'m>>, ReplayError> {
        let Some(store) = self.store else { return Ok(None) };
        self.check_versions(label)?;
        let Some(unit) = self.unit(label) else { return Ok(None) };
        store.open(unit).map_err(dist)?;
        Ok(Some(Window { store, unit }))
    }

    /// Entry `number` is of a block that may be replayed.
    pub(crate) fn recorded(&self, number: u64, label: &Label) {
        if let Some(unit) = self.unit(label) {
            self.expected.borrow_mut().insert(number, unit);
        }
    }

    /// It will not, or it is.
    pub(crate) fn gone(&self, number: u64) {
        self.expected.borrow_mut().remove(&number);
    }

    /// A block's window is open, and the block about to be replayed: the one before it comes next.
    pub(crate) fn look_ahead(&self) -> Result<(), ReplayError> {
        let next = self.expected.borrow().last_key_value().map(|(_, unit)| *unit);
        self.store.map_or(Ok(()), |store| store.prefetch(next)).map_err(dist)
    }

    /// Whether the parameters are as they were when the rollout began.
    pub(crate) fn check_versions(&self, label: &Label) -> Result<(), ReplayError> {
        let Some(store) = self.store else { return Ok(()) };
        let block = &*label.block;
        let Some(before) = self.versions.get() else { return Ok(()) };
        match store.changed(before).map_err(dist)? {
            None => Ok(()),
            Some(variable) => Err(ReplayError::VariableChanged { block: block.to_owned(), variable, what: "values" }),
        }
    }

    /// The window stays open until the block of entry `number` is differentiated.
    pub(crate) fn keep(&self, number: u64, window: Option<Window<'_>>) {
        if let Some(window) = window {
            self.replayed.borrow_mut().insert(number, window.unit);
            std::mem::forget(window);
        }
    }

    /// The block has been differentiated: its gradients are added up over all processes, and its window closes.
    pub(crate) fn settle(&self, number: u64) -> Result<(), ReplayError> {
        let unit = self.replayed.borrow_mut().remove(&number);
        let Some((store, unit)) = self.store.zip(unit) else { return Ok(()) };
        let window = Window { store, unit };
        let grads = store.take_grads(unit);
        // What they are added up with is as large as they are: not beside the parameters.
        drop(window);
        grads.and_then(|grads| store.reduce(unit, grads)).map_err(dist)
    }

    /// After the pass: the resident unit's gradients too, and then all pieces have theirs.
    pub(crate) fn flush(&self) -> Result<(), ReplayError> {
        let Some(store) = self.store else { return Ok(()) };
        if let Some(before) = self.versions.get()
            && let Some(parameter) = store.changed(before).map_err(dist)?
        {
            return Err(dist(DistError::Written { parameter }));
        }
        let grads = store.take_grads(store.resident());
        self.close();
        grads.and_then(|grads| store.reduce(store.resident(), grads)).and_then(|()| store.flush()).map_err(dist)
    }

    /// This process has failed: the others must not wait for it.
    pub(crate) fn abort(&self, why: &str) {
        let Some(store) = self.store else { return };
        store.forget();
        store.abort(why);
    }

    /// Closes all windows.
    pub(crate) fn close(&self) {
        let Some(store) = self.store else { return };
        for (_, unit) in self.replayed.take() {
            store.close(unit);
        }
        if self.resident.replace(false) {
            store.close(store.resident());
        }
    }
}
