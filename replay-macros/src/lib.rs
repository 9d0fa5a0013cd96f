//! The `#[replay_block]` attribute of `replay-runtime`, which re-exports it.
#![forbid(unsafe_code)]

mod args;
mod attribute;
mod diagnostics;
mod docs;
mod expand;
mod impl_block;
mod lifetimes;
mod model;
mod output;
mod parameters;
mod receiver;
mod signature;
mod types;
mod validate;

use proc_macro::TokenStream;

/// x
#[proc_macro_attribute]
pub fn replay_block(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute::replay_block(options.into(), item.into()).into()
}
