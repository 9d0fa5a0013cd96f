#[replay_block]
fn r#loop<'rollout>(&self, rollout: &'rollout Tensor, replay_rollout: &Tensor, r#type: &Tensor) -> Tensor {
    rollout + replay_rollout + r#type
}

// becomes

fn r#loop<'rollout>(
    &self,
    rollout: &'rollout Tensor,
    replay_rollout: &Tensor,
    r#type: &Tensor,
) -> Tensor {
    rollout + replay_rollout + r#type
}
/// [`r#loop`](Self::r#loop) run as a replay block of `replay_replay_rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `rollout`, `replay_rollout`, `type`.
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
fn loop_replay<'rollout_, 'rollout>(
    &'rollout_ self,
    replay_replay_rollout: &::replay_runtime::Rollout<'rollout_>,
    rollout: &'rollout Tensor,
    replay_rollout: &Tensor,
    r#type: &Tensor,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "loop",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &["rollout", "replay_rollout", "type"],
        "Tensor",
        false,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    let (__replay_input_rollout, __replay_form_rollout) = ::replay_runtime::private::input(
        &rollout,
    );
    let (__replay_input_replay_rollout, __replay_form_replay_rollout) = ::replay_runtime::private::input(
        &replay_rollout,
    );
    let (__replay_input_type, __replay_form_type) = ::replay_runtime::private::input(
        &r#type,
    );
    ::replay_runtime::private::run(
        replay_replay_rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[__replay_input_rollout, __replay_input_replay_rollout, __replay_input_type],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::r#loop(
                self,
                ::replay_runtime::private::next_input(
                    __replay_form_rollout,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_replay_rollout,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_type,
                    &mut __replay_leaves,
                ),
            )
        },
    )
}
