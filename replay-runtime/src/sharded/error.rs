//! Why a store cannot be cut.

use tch::{Device, Kind};

use crate::dist::DistError;

/// A store that cannot be cut as it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// No variable has such a name.
    #[error("no variable's name is `{prefix}` or begins with `{prefix}.`\nthe store has: {}", .known.join(", "))]
    NoVariable {
        /// What the unit, or what is to be ignored, was said to be called.
        prefix: String,
        /// The first names that there are.
        known: Vec<String>,
    },

    /// Two units have the same parameter.
    #[error(
        "parameter `{parameter}` belongs to unit `{first}` and to unit `{second}`\na unit is a block without blocks inside; give a parameter that two blocks use to neither"
    )]
    Claimed {
        /// The parameter.
        parameter: String,
        /// The first unit.
        first: String,
        /// The second unit.
        second: String,
    },

    /// One tensor has two names, and a block of the one would not find it whole that comes with the other.
    #[error(
        "`{first}` ({first_owner}) and `{second}` ({second_owner}) are one tensor\nall its names must be in one unit, all in none, or all ignored; give a tensor that two blocks use names that are below no unit's"
    )]
    Tied {
        /// The first name.
        first: String,
        /// Its unit, or that it has none.
        first_owner: String,
        /// The second name.
        second: String,
        /// Its unit, or that it has none.
        second_owner: String,
    },

    /// Two variables share memory, and one of them was to be cut: then they would share it no more.
    #[error(
        "variables `{first}` and `{second}` share memory, as views of one tensor do, and pieces cannot\nmake one of them a copy, give the store the same tensor under both names, or leave both whole with `ignore`"
    )]
    SharedMemory {
        /// The first variable.
        first: String,
        /// The second variable.
        second: String,
    },

    /// Something else holds the memory of a parameter, and would keep all of it, or has cut it already.
    #[error(
        "the memory of parameter `{parameter}` is held by something that is no variable: a view of it, a graph, or another sharded store\ndrop that first, or leave the parameter whole with `ignore(\"{parameter}\")`"
    )]
    Held {
        /// The parameter.
        parameter: String,
    },

    /// One object was named as two units.
    #[error("unit `{first}` and unit `{second}` are the same object")]
    SameObject {
        /// The first unit.
        first: String,
        /// The second unit.
        second: String,
    },

    /// A parameter that cannot be cut.
    #[error(
        "parameter `{parameter}` is {what}, which cannot be sharded\npieces are f32, f64 or bf16, on the CPU (`compute_on` brings them to a GPU while they are whole); leave it whole with `ignore(\"{parameter}\")`"
    )]
    Parameter {
        /// The parameter.
        parameter: String,
        /// What it is.
        what: String,
    },

    /// Blocks cannot compute there.
    #[error(
        "blocks of a sharded store cannot compute on {device:?}\ntake the CPU, or a CUDA device that this process sees"
    )]
    Device {
        /// The device.
        device: Device,
    },

    /// A kind that parameters or gradients cannot be sent in.
    #[error(
        "parameters and gradients cannot be sent as {kind:?}\ntake Float, Double or BFloat16: those need no scaled loss"
    )]
    Mixed {
        /// The kind.
        kind: Kind,
    },

    /// The processes disagree, or one is gone.
    #[error(transparent)]
    Dist(#[from] DistError),
}
