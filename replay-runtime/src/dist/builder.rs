//! How a process finds the others.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tch::Device;

use super::{Dist, DistError, env};
use crate::ffi::{Group, GroupStore, ShimError};

/// Where ranks find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Tcp(String, u16),
    File(PathBuf),
}

/// Choices for a [`Dist`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `connect` is called"]
pub struct DistBuilder {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) local_rank: usize,
    pub(super) place: Option<Place>,
    /// Somebody else serves the store.
    pub(super) agent: bool,
    pub(super) prefix: String,
    timeout: Duration,
    wait: Duration,
    /// The CUDA device whose tensors go by NCCL.
    nccl: Option<usize>,
}

impl DistBuilder {
    pub(super) fn new(rank: usize, world: usize) -> Self {
        Self {
            rank,
            world,
            local_rank: rank,
            place: None,
            agent: false,
            prefix: "replay".to_owned(),
            timeout: Duration::from_mins(10),
            wait: Duration::from_mins(5),
            nccl: None,
        }
    }

    /// The ranks meet at a server at this address, which rank 0 is.
    pub fn tcp(mut self, host: &str, port: u16) -> Self {
        self.place = Some(Place::Tcp(host.to_owned(), port));
        self
    }

    /// The ranks meet at a file that all of them see. It must be new, and is left behind.
    pub fn file(mut self, path: impl AsRef<Path>) -> Self {
        self.place = Some(Place::File(path.as_ref().to_owned()));
        self
    }

    /// Tells groups that use one store apart; the same on all ranks. Default: `replay`.
    pub fn prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.prefix);
        self
    }

    /// How long an operation waits for other ranks. Default: 10 minutes. It must be longer than the ranks differ in what they
    /// do in between.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long to wait for the other ranks in the beginning. Default: 5 minutes.
    pub fn connect_timeout(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// The number of this process on its machine. Default: the rank.
    pub fn local_rank(mut self, local_rank: usize) -> Self {
        self.local_rank = local_rank;
        self
    }

    /// Parameters and gradients of a store that [computes](crate::ShardedBuilder::compute_on) on CUDA device `device` go from GPU to GPU
    /// by NCCL. What ranks say to each other goes by Gloo all the same. An operation that takes longer than the timeout ends the
    /// process: that is how LibTorch watches over NCCL. Not yet run on a GPU.
    #[cfg(feature = "nccl")]
    pub fn nccl(mut self, device: usize) -> Self {
        self.nccl = Some(device);
        self
    }

    /// Finds the other ranks. A world of one needs none, and no place.
    ///
    /// # Errors
    /// [`DistError::Rank`], [`DistError::NoStore`], and [`DistError::Connect`] where not all ranks come in time.
    pub fn connect(self) -> Result<Dist, DistError> {
        let (rank, world) = (self.rank, self.world);
        if rank >= world {
            return Err(DistError::Rank { rank, world });
        }
        let group = if world > 1 { Some(self.group()?) } else { None };
        Ok(self.begin(group))
    }

    /// The device whose tensors need not come to the host to be sent.
    fn payload(&self) -> Device {
        self.nccl.filter(|_| self.world > 1).map_or(Device::Cpu, Device::Cuda)
    }

    pub(super) fn begin(self, group: Option<Group>) -> Dist {
        let payload = self.payload();
        let Self { rank, world, local_rank, timeout, .. } = self;
        let (units, first_failure) = (RefCell::default(), RefCell::default());
        let (sequence, done) = (Cell::new(0), Cell::new(false));
        Dist { rank, world, local_rank, timeout, payload, group, units, sequence, first_failure, done }
    }

    fn group(&self) -> Result<Group, DistError> {
        let (rank, world, wait) = (self.rank, self.world, self.wait);
        let place = self.place.as_ref().ok_or(DistError::NoStore { world })?;
        let (text, store) = match place {
            Place::Tcp(host, port) => {
                let serves = rank == 0 && !self.agent;
                (format!("{host}:{port}"), GroupStore::tcp(host, *port, serves, world, wait))
            }
            Place::File(path) => (path.display().to_string(), GroupStore::file(path, world, wait)),
        };
        let failed = |source: ShimError| DistError::Connect {
            rank,
            world,
            wait,
            place: text.clone(),
            network: env::network(&|name| std::env::var(name).ok()),
            source: Box::new(source.into()),
        };
        let group = Group::new(&store.map_err(failed)?, &self.prefix, rank, world, self.timeout).map_err(failed)?;
        #[cfg(feature = "nccl")]
        let group = self.with_nccl(group).map_err(failed)?;
        Ok(group)
    }

    #[cfg(feature = "nccl")]
    fn with_nccl(&self, mut group: Group) -> Result<Group, ShimError> {
        if let Some(device) = self.nccl {
            group.add_nccl(self.rank, device, self.timeout)?;
        }
        Ok(group)
    }
}
