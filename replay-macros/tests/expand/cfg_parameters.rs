#[replay_block]
#[cfg(feature = "world")]
fn step(
    &self,
    #[cfg(feature = "mask")] mask: &Tensor,
    x: &Tensor,
    #[cfg(feature = "frame")]
    #[meta]
    frame: i64,
) -> Tensor {
    x.shallow_clone()
}

// becomes

#[cfg(feature = "world")]
fn step(
    &self,
    #[cfg(feature = "mask")]
    mask: &Tensor,
    x: &Tensor,
    #[cfg(feature = "frame")]
    frame: i64,
) -> Tensor {
    x.shallow_clone()
}
#[cfg(feature = "world")]
/// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `mask`, `x`.
///
/// Data, kept as a copy: `frame`.
///
/// # Errors
///
/// Where the block cannot be recorded, or returns an error itself.
#[allow(
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
fn step_replay<'rollout>(
    &'rollout self,
    rollout: &::replay_runtime::Rollout<'rollout>,
    #[cfg(feature = "mask")]
    mask: &Tensor,
    x: &Tensor,
    #[cfg(feature = "frame")]
    frame: i64,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "step",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &[#[cfg(feature = "mask")] "mask", "x"],
        "Tensor",
        false,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    #[cfg(feature = "frame")]
    let () = ::replay_runtime::private::assert_meta(&frame);
    #[cfg(feature = "mask")]
    let (__replay_input_mask, __replay_form_mask) = ::replay_runtime::private::input(
        &mask,
    );
    let (__replay_input_x, __replay_form_x) = ::replay_runtime::private::input(&x);
    ::replay_runtime::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[#[cfg(feature = "mask")] __replay_input_mask, __replay_input_x],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::step(
                self,
                #[cfg(feature = "mask")]
                ::replay_runtime::private::next_input(
                    __replay_form_mask,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_x,
                    &mut __replay_leaves,
                ),
                #[cfg(feature = "frame")]
                ::core::clone::Clone::clone(&frame),
            )
        },
    )
}
