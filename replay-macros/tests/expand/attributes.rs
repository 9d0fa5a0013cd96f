#[replay_block]
#[inline]
#[deprecated = "use `leap`"]
#[expect(non_snake_case, reason = "as in the paper")]
#[unsafe(no_mangle)]
#[target_feature(enable = "avx2")]
#[cfg_attr(docsrs, doc(hidden), cold)]
#[tracing::instrument]
pub fn step(
    &self,
    #[cfg_attr(a, cfg(b))] X: &Tensor,
    #[cfg_attr(replay, meta, allow(unused))] name: &'static str,
) -> Tensor {
    X.shallow_clone()
}

// becomes

#[inline]
#[deprecated = "use `leap`"]
#[expect(non_snake_case, reason = "as in the paper")]
#[unsafe(no_mangle)]
#[target_feature(enable = "avx2")]
#[cfg_attr(docsrs, doc(hidden), cold)]
#[tracing::instrument]
pub fn step(
    &self,
    #[cfg_attr(a, cfg(b))]
    X: &Tensor,
    #[cfg_attr(replay, allow(unused))]
    name: &'static str,
) -> Tensor {
    X.shallow_clone()
}
#[deprecated = "use `leap`"]
#[allow(non_snake_case, reason = "as in the paper")]
#[target_feature(enable = "avx2")]
#[cfg_attr(docsrs, doc(hidden))]
/// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `X`.
///
/// Data, kept as a copy: `name`.
///
/// # Errors
///
/// Where the block cannot be recorded, or returns an error itself.
#[allow(
    non_snake_case,
    deprecated,
    private_bounds,
    private_interfaces,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::nursery,
    clippy::pedantic,
    reason = "the signature follows the method's"
)]
pub fn step_replay<'rollout>(
    &'rollout self,
    rollout: &::replay_runtime::Rollout<'rollout>,
    #[cfg_attr(a, cfg(b))]
    X: &Tensor,
    name: &'static str,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "step",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &[#[cfg_attr(a, cfg(b))] "X"],
        "Tensor",
        false,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    let () = ::replay_runtime::private::assert_meta(&name);
    #[cfg_attr(a, cfg(b))]
    let (__replay_input_X, __replay_form_X) = ::replay_runtime::private::input(&X);
    ::replay_runtime::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[#[cfg_attr(a, cfg(b))] __replay_input_X],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::step(
                self,
                #[cfg_attr(a, cfg(b))]
                ::replay_runtime::private::next_input(
                    __replay_form_X,
                    &mut __replay_leaves,
                ),
                ::core::clone::Clone::clone(&name),
            )
        },
    )
}
