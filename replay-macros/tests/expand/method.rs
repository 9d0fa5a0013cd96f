#[replay_block]
/// One step.
#[inline]
pub fn step(&self, state: &Tensor, action: &Tensor, #[meta] frame: i64) -> (Tensor, Tensor) {
    (state + action, state * frame as f64)
}

// becomes

/// One step.
#[inline]
pub fn step(&self, state: &Tensor, action: &Tensor, frame: i64) -> (Tensor, Tensor) {
    (state + action, state * frame as f64)
}
/// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `state`, `action`.
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
pub fn step_replay<'rollout>(
    &'rollout self,
    rollout: &::replay_runtime::Rollout<'rollout>,
    state: &Tensor,
    action: &Tensor,
    frame: i64,
) -> ::core::result::Result<(Tensor, Tensor), ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "step",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &["state", "action"],
        "(Tensor, Tensor)",
        false,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    let () = ::replay_runtime::private::assert_meta(&frame);
    let (__replay_input_state, __replay_form_state) = ::replay_runtime::private::input(
        &state,
    );
    let (__replay_input_action, __replay_form_action) = ::replay_runtime::private::input(
        &action,
    );
    ::replay_runtime::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[__replay_input_state, __replay_input_action],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::step(
                self,
                ::replay_runtime::private::next_input(
                    __replay_form_state,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_action,
                    &mut __replay_leaves,
                ),
                ::core::clone::Clone::clone(&frame),
            )
        },
    )
}
