//! The `#[replay_block]` attribute of `replay-runtime`, which re-exports it.
#![forbid(unsafe_code)]

mod args;
mod attribute;
mod carried;
mod diagnostics;
mod docs;
mod expand;
mod fallback;
#[cfg(test)]
mod golden;
mod impl_block;
mod lifetimes;
mod model;
mod output;
mod parameters;
mod qualify;
mod receiver;
mod signature;
mod types;
mod validate;

use proc_macro::TokenStream;

/// Makes a method a block of a rollout: the forward pass keeps only its inputs, the backward pass runs it again.
///
/// The method stays as it is. Beside it stands a new one, `<name>_replay`, which takes the rollout first and returns
/// a `Result`:
///
/// ```ignore
/// impl World {
///     #[replay_block]
///     fn step(&self, state: &Tensor, action: &Tensor, #[meta] frame: i64) -> (Tensor, Tensor) { .. }
///     // adds:
///     // fn step_replay<'rollout>(&'rollout self, rollout: &Rollout<'rollout>, state: &Tensor, action: &Tensor,
///     //     frame: i64) -> Result<(Tensor, Tensor), ReplayError>
/// }
/// ```
///
/// # Signature
///
/// * **Receiver**: `&self`, or none.
/// * **Inputs**: `&Tensor`, `Tensor`, `Option<&Tensor>` or `Option<Tensor>`, one at least, each with a name of its own.
/// * **Data**: any other parameter is marked `#[meta]` and is `Clone + Send + 'static`: owned, or a `&'static str`.
///   Each run gets a clone.
/// * **Output**: `Tensor`, a flat tuple of up to twelve, or a `Result` of either with an error that turns into
///   `Box<dyn Error + Send + Sync>`. The sibling returns what is inside the `Ok`.
/// * **Generics**, `where` clauses and `#[cfg]` on parameters are passed on; type and const parameters keep their
///   order, so that `step_replay::<K>` is called like `step::<K>`.
/// * Not `async`, `const`, `unsafe`, `extern` or variadic.
///
/// A function without a receiver is taken for an associated one where the word `Self` stands anywhere in it, and for
/// a free one elsewhere.
///
/// # Options
///
/// | option | meaning |
/// |---|---|
/// | `name = "again"` | the name of the new method |
/// | `context = path` | `path(self)` (or `path()`) makes a `ReplayContext` that is open around the forward and each replay |
/// | `buffers` | the block may update non-trainable variables (statistics of `BatchNorm`): once, in the forward |
/// | `early_stop` | the replay ends, by unwinding, as soon as all that the gradient needs has been computed again |
/// | `crate = ::path` | where the runtime is, if not at `::replay_runtime`; absolute |
///
/// # Blocks that run blocks
///
/// Such a block takes the rollout itself, and names its lifetime:
///
/// ```ignore
/// #[replay_block]
/// fn two_steps<'m>(&'m self, rollout: &Rollout<'m>, state: &Tensor) -> Result<Tensor, ReplayError> {
///     let state = self.step_replay(rollout, state)?;
///     self.step_replay(rollout, &state)
/// }
/// ```
///
/// # Impl blocks
///
/// A trait impl cannot hold a further method, so there the attribute goes on the impl and the new methods into an
/// inherent impl beside it, public. A method is marked inside; an only one need not be. On an inherent impl the
/// attribute gives blocks the name of the type in the registry (`World::step`). Its one option is `crate`.
///
/// ```ignore
/// #[replay_block]
/// impl nn::Module for Net {
///     fn forward(&self, xs: &Tensor) -> Tensor { .. }
/// }
/// // adds: impl Net { pub fn forward_replay(..) .. }
/// ```
///
/// On a method inside a trait impl the attribute fails with E0407: move it to the impl. A provided method of a trait
/// can be a block, and its sibling is a provided one as well. On a method that a trait only declares it is an error;
/// put it on the impls.
///
/// # Attributes and lints
///
/// Attributes of the method stay on it. Those that say something of its signature hold for the new one too: `#[cfg]`,
/// `#[allow]`, `#[deprecated]`, `#[doc(hidden)]`, `#[target_feature]`, also inside `#[cfg_attr]`. Where this crate is an
/// optional dependency, write `#[cfg_attr(feature = "replay", replay_block)]` and the same with `meta`. Attributes that
/// rewrite the body, as `#[tracing::instrument]`, may stand above or below this one, and see the replay as well.
///
/// A private method whose sibling nobody calls is said to be never used, as it should be: the block is never replayed.
#[proc_macro_attribute]
pub fn replay_block(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute::replay_block(options.into(), item.into()).into()
}
