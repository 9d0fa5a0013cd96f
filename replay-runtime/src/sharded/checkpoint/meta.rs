//! What `meta.json` says of a checkpoint. It is written last: without it there is none.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, Result, damaged, io};

pub(super) const META: &str = "meta.json";
const FORMAT: u32 = 1;

/// One checkpoint of `world` processes, each of which has written a file `rank_N.safetensors` with its pieces: of a tensor of `n`
/// elements rank `r` has those from `r * ceil(n / world)` on, `ceil(n / world)` of them at most.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Meta {
    format: u32,
    /// That of all files of one save.
    pub(super) id: String,
    pub(super) world: usize,
    pub(super) step: u64,
    /// Bytes of each rank's file.
    pub(super) bytes: Vec<u64>,
    /// In pieces.
    pub(super) parameters: BTreeMap<String, Shape>,
    /// Further names of those, and under which name they are saved.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) ties: BTreeMap<String, String>,
    /// Whole in each rank's file.
    pub(super) others: BTreeMap<String, Shape>,
    pub(super) optimizer: Option<OptimizerMeta>,
}

/// Of a variable.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Shape {
    pub(super) shape: Vec<i64>,
    pub(super) kind: String,
}

/// What an optimizer knows beside tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct OptimizerMeta {
    pub(super) algorithm: String,
    /// Of each group.
    pub(super) learning_rates: Vec<f64>,
    /// Of each variable that it has stepped.
    pub(super) states: BTreeMap<String, StateMeta>,
}

/// What it knows of one variable.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct StateMeta {
    pub(super) step: u64,
    pub(super) tensors: Vec<String>,
}

impl Meta {
    pub(super) fn new(id: String, step: u64, bytes: Vec<u64>) -> Self {
        let (parameters, ties, others) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { format: FORMAT, id, world: bytes.len(), step, bytes, parameters, ties, others, optimizer: None }
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(META);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(CheckpointError::Missing { path: folder.to_owned(), file: META });
            }
            Err(error) => return Err(io("read", &path)(error)),
        };
        let format = serde_json::from_slice::<serde_json::Value>(&text).ok().and_then(|value| value["format"].as_u64());
        if format.is_some_and(|format| format != u64::from(FORMAT)) {
            let found = format.unwrap_or_default();
            return Err(damaged(&path, format!("is of format {found}, and this library reads format {FORMAT}")));
        }
        let meta: Self =
            serde_json::from_slice(&text).map_err(|error| damaged(&path, format!("cannot be read: {error}")))?;
        if meta.world == 0 || meta.bytes.len() != meta.world {
            return Err(damaged(&path, format!("says {} processes, and {} files", meta.world, meta.bytes.len())));
        }
        Ok(meta)
    }
}

/// The file of one rank.
pub(super) fn rank_file(rank: usize) -> String {
    format!("rank_{rank}.safetensors")
}
