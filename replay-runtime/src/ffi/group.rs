//! A process group and the store by which its ranks meet; `cpp/group.h`.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::time::Duration;

use tch::Tensor;
use torch_sys::C_tensor;

use super::sys::{self, CGroup, CStore, CWorks};
use super::{ShimError, c_string, check};

fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Where ranks find each other.
#[derive(Debug)]
pub(crate) struct GroupStore(NonNull<CStore>);

impl GroupStore {
    /// That of a server at `host` and `port`, which this process is itself where it `serves`. Waits so long for it.
    pub(crate) fn tcp(host: &str, port: u16, serves: bool, world: usize, wait: Duration) -> Result<Self, ShimError> {
        let (host, mut out) = (c_string(host), ptr::null_mut());
        let (port, serves, wait) = (c_int::from(port), c_int::from(serves), milliseconds(wait));
        // SAFETY: the text is borrowed for the call; `out` receives an object that only we own.
        check(unsafe { sys::replay_store_tcp(host.as_ptr(), port, serves, world, wait, &raw mut out) })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without a store")))
    }

    /// That of a file which all ranks see.
    pub(crate) fn file(path: &Path, world: usize, wait: Duration) -> Result<Self, ShimError> {
        let (path, mut out) = (c_string(&path.to_string_lossy()), ptr::null_mut());
        // SAFETY: as for `tcp`.
        check(unsafe { sys::replay_store_file(path.as_ptr(), world, milliseconds(wait), &raw mut out) })?;
        Ok(Self(NonNull::new(out).expect("the shim answered 0 without a store")))
    }
}

impl Drop for GroupStore {
    fn drop(&mut self) {
        // SAFETY: made by one of the constructors and freed once; a group has a share of its own.
        unsafe { sys::replay_store_free(self.0.as_ptr()) }
    }
}

/// The ranks of one run, for the thread that made it.
#[derive(Debug)]
pub(crate) struct Group {
    raw: NonNull<CGroup>,
    world: i64,
    _thread: PhantomData<*const ()>,
}

impl Group {
    /// Waits for all ranks. `timeout` is that of each operation, this one included.
    pub(crate) fn new(
        store: &GroupStore,
        prefix: &str,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> Result<Self, ShimError> {
        let (prefix, mut out) = (c_string(prefix), ptr::null_mut());
        let number = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);
        let timeout = milliseconds(timeout);
        // SAFETY: the store lives during the call, and C++ takes a share of it; `out` receives an object that only we own.
        check(unsafe {
            sys::replay_group_new(store.0.as_ptr(), prefix.as_ptr(), number(rank), number(world), timeout, &raw mut out)
        })?;
        let raw = NonNull::new(out).expect("the shim answered 0 without a group");
        Ok(Self { raw, world: i64::from(number(world)), _thread: PhantomData })
    }

    /// From now on tensors on the CUDA device of that number go by NCCL, which must be so on all ranks.
    #[cfg(feature = "nccl")]
    pub(crate) fn add_nccl(&mut self, rank: usize, device: usize, timeout: Duration) -> Result<(), ShimError> {
        let number = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);
        // SAFETY: the group is this one's alone, and no operation of it is under way.
        check(unsafe {
            sys::replay_group_add_nccl(self.raw.as_ptr(), number(rank), number(device), milliseconds(timeout))
        })
    }

    /// Leaves a note that other ranks can read at any time.
    pub(crate) fn note(&self, key: &str, text: &str) -> Result<(), ShimError> {
        let (key, text) = (c_string(key), c_string(text));
        // SAFETY: the texts are borrowed for the call.
        check(unsafe { sys::replay_group_note(self.raw.as_ptr(), key.as_ptr(), text.as_ptr()) })
    }

    /// A note, if there is one.
    pub(crate) fn read_note(&self, key: &str) -> Result<Option<String>, ShimError> {
        let mut text: [c_char; 512] = [0; 512];
        let key = c_string(key);
        // SAFETY: C++ writes at most the capacity, a zero byte included.
        check(unsafe { sys::replay_group_read_note(self.raw.as_ptr(), key.as_ptr(), text.as_mut_ptr(), text.len()) })?;
        // SAFETY: ended by the shim, or all zero.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        Ok((!text.is_empty()).then_some(text))
    }

    /// Each rank's `own`, in rank order, in `all`.
    ///
    /// # Panics
    /// If the sizes do not fit each other: a shorter buffer than what arrives ends the process.
    pub(crate) fn all_gather(&self, all: &Tensor, own: &Tensor) -> Result<(), ShimError> {
        assert!(all.is_contiguous() && own.is_contiguous() && all.kind() == own.kind(), "as LibTorch wants them");
        assert_eq!(all.numel(), own.numel() * usize::try_from(self.world).unwrap_or(0), "room for all ranks");
        // SAFETY: both live until the call returns, which is when LibTorch has written `all`, or given up.
        check(unsafe { sys::replay_group_all_gather(self.raw.as_ptr(), all.as_ptr().cast_mut(), own.as_ptr()) })
    }

    /// Each of `wholes` is one piece for each rank; begins to fill in those of the others.
    ///
    /// # Panics
    /// As for [`all_gather`](Self::all_gather).
    pub(crate) fn gather_pieces(&self, wholes: &[Tensor]) -> Result<Works, ShimError> {
        for whole in wholes {
            self.check_even(whole);
        }
        let (wholes, mut out) = (raw_mut(wholes), ptr::null_mut());
        // SAFETY: the list is borrowed for the call; C++ holds the storages while an operation writes to them. `out` receives
        // an object that only we own.
        check(unsafe {
            sys::replay_group_gather_pieces(self.raw.as_ptr(), wholes.as_ptr(), wholes.len(), &raw mut out)
        })?;
        Ok(Works::new(out))
    }

    /// Piece `i` of each of `pieces` begins to go to rank `i`; in `received` will be those for this one, in rank order.
    ///
    /// # Panics
    /// As for [`all_gather`](Self::all_gather).
    pub(crate) fn exchange_pieces(&self, received: &[Tensor], pieces: &[Tensor]) -> Result<Works, ShimError> {
        for pieces in pieces {
            self.check_even(pieces);
        }
        let same = |(a, b): (&Tensor, &Tensor)| a.is_contiguous() && a.kind() == b.kind() && a.size() == b.size();
        assert!(received.len() == pieces.len() && received.iter().zip(pieces).all(same), "as much as is sent");
        let (received, pieces, mut out) = (raw_mut(received), raw_mut(pieces), ptr::null_mut());
        let (into, from, n) = (received.as_ptr(), pieces.as_ptr(), pieces.len());
        // SAFETY: as for `gather_pieces`; both lists have the same length.
        check(unsafe { sys::replay_group_exchange_pieces(self.raw.as_ptr(), into, from, n, &raw mut out) })?;
        Ok(Works::new(out))
    }

    fn check_even(&self, tensor: &Tensor) {
        let size = tensor.size1().expect("a vector");
        assert!(tensor.is_contiguous() && size % self.world == 0, "even pieces");
    }

    /// `tensor`, of one size on all ranks, takes the values of rank `root`'s.
    ///
    /// # Panics
    /// If it is not contiguous.
    pub(crate) fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), ShimError> {
        assert!(tensor.is_contiguous(), "as LibTorch wants it");
        let root = c_int::try_from(root).unwrap_or(c_int::MAX);
        // SAFETY: as for `all_gather`.
        check(unsafe { sys::replay_group_broadcast(self.raw.as_ptr(), tensor.as_ptr().cast_mut(), root) })
    }
}

fn raw_mut(tensors: &[Tensor]) -> Vec<*mut C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: made by `replay_group_new` and freed once; what is under way has shares of all that it needs.
        unsafe { sys::replay_group_free(self.raw.as_ptr()) }
    }
}

/// What a group is doing. Dropped, it is done all the same, and nobody hears of it. It borrows nothing: each work has a share of
/// the connections and of its tensors for as long as it needs them, and the group's end waits for those that have not begun.
#[derive(Debug)]
#[must_use = "nothing says that it is done but `wait`"]
pub(crate) struct Works(NonNull<CWorks>);

impl Works {
    fn new(raw: *mut CWorks) -> Self {
        Self(NonNull::new(raw).expect("the shim answered 0 without an object"))
    }

    /// Until all of it is done; with NCCL, until it is in the current stream's order.
    pub(crate) fn wait(self) -> Result<(), ShimError> {
        // SAFETY: the object lives as long as `self`; LibTorch's threads do the work, and this one waits.
        check(unsafe { sys::replay_works_wait(self.0.as_ptr()) })
    }
}

impl Drop for Works {
    fn drop(&mut self) {
        // SAFETY: made by the group, freed once; what is not done holds what it needs by itself.
        unsafe { sys::replay_works_free(self.0.as_ptr()) }
    }
}
