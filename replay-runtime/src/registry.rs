//! Every block that the attribute compiled into the program.
//!
//! Generated code holds one `static` [`BlockInfo`] per block and submits a reference to it. Only crates that are
//! linked count, and the linker's order means nothing, so [`blocks`] sorts.

use std::fmt;

/// What is known of a block before it runs: where it was written, and how its inputs and outputs are called.
///
/// ```no_run
/// for block in replay_runtime::blocks() {
///     println!("{block} ({}:{}): {:?} -> {}", block.file(), block.line(), block.inputs(), block.outputs());
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockInfo {
    name: &'static str,
    module: &'static str,
    file: &'static str,
    line: u32,
    inputs: &'static [&'static str],
    outputs: &'static str,
    nested: bool,
    buffers: bool,
    early_stop: bool,
}

impl BlockInfo {
    /// The method, with its type where the attribute could see it: `step`, `World::step`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The module that holds the block, as `module_path!()` spells it.
    #[must_use]
    pub const fn module(&self) -> &'static str {
        self.module
    }

    /// The source file, as `file!()` spells it.
    #[must_use]
    pub const fn file(&self) -> &'static str {
        self.file
    }

    /// The line of the attribute.
    #[must_use]
    pub const fn line(&self) -> u32 {
        self.line
    }

    /// The names of the tensor inputs, in the order of the parameters.
    #[must_use]
    pub const fn inputs(&self) -> &'static [&'static str] {
        self.inputs
    }

    /// The output type as written.
    #[must_use]
    pub const fn outputs(&self) -> &'static str {
        self.outputs
    }

    /// Whether the block takes the rollout itself, to run other blocks.
    #[must_use]
    pub const fn nested(&self) -> bool {
        self.nested
    }

    /// Whether the block may update non-trainable variables: `#[replay_block(buffers)]`.
    #[must_use]
    pub const fn updates_buffers(&self) -> bool {
        self.buffers
    }

    /// Whether the block's replay may end before its body does: `#[replay_block(early_stop)]`.
    #[must_use]
    pub const fn stops_early(&self) -> bool {
        self.early_stop
    }
}

impl fmt::Display for BlockInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.module, self.name)
    }
}

/// Every block that the attribute compiled into the program, sorted by module, name and line.
#[must_use]
pub fn blocks() -> Vec<&'static BlockInfo> {
    let mut blocks: Vec<_> = inventory::iter::<Registration>.into_iter().map(|entry| entry.0).collect();
    blocks.sort_by_key(|block| (block.module, block.name, block.line));
    blocks
}

/// What generated code submits.
#[derive(Debug)]
pub struct Registration(&'static BlockInfo);

inventory::collect!(Registration);

/// Wraps a block for the registry.
#[must_use]
pub const fn registration(block: &'static BlockInfo) -> Registration {
    Registration(block)
}

/// Builds the `static` of a block.
#[must_use]
#[expect(clippy::too_many_arguments, reason = "generated code alone calls it, and a table of literals is what it has")]
pub const fn block_info(
    name: &'static str,
    module: &'static str,
    file: &'static str,
    line: u32,
    inputs: &'static [&'static str],
    outputs: &'static str,
    nested: bool,
    buffers: bool,
    early_stop: bool,
) -> BlockInfo {
    BlockInfo { name, module, file, line, inputs, outputs, nested, buffers, early_stop }
}
