//! Fuzz target of the attribute: whatever it is put on, it answers with tokens and no panic, with the item still there,
//! and with items that parse where there were some.
//!
//! `cargo xtask soak` builds and runs it.
#![no_main]

#[path = "../../replay-macros/src/args.rs"]
mod args;
#[path = "../../replay-macros/src/attribute.rs"]
mod attribute;
#[path = "../../replay-macros/src/carried.rs"]
mod carried;
mod check;
#[path = "../../replay-macros/src/diagnostics.rs"]
mod diagnostics;
#[path = "../../replay-macros/src/docs.rs"]
mod docs;
#[path = "../../replay-macros/src/expand.rs"]
#[allow(clippy::module_inception, reason = "the target is called like this stage")]
mod expand;
#[path = "../../replay-macros/src/fallback.rs"]
mod fallback;
#[path = "../../replay-macros/src/impl_block.rs"]
mod impl_block;
#[path = "../../replay-macros/src/lifetimes.rs"]
mod lifetimes;
#[path = "../../replay-macros/src/model.rs"]
mod model;
mod mutate;
#[path = "../../replay-macros/src/output.rs"]
mod output;
#[path = "../../replay-macros/src/parameters.rs"]
mod parameters;
#[path = "../../replay-macros/src/qualify.rs"]
mod qualify;
#[path = "../../replay-macros/src/receiver.rs"]
mod receiver;
mod seeds;
#[path = "../../replay-macros/src/signature.rs"]
#[allow(dead_code, reason = "the golden tests use all of it")]
mod signature;
#[path = "../../replay-macros/src/types.rs"]
mod types;
#[path = "../../replay-macros/src/validate.rs"]
mod validate;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((options, item)) = mutate::input(data, seeds::all()) else { return };
    check::check(options, item);
});
