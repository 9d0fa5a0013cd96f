#[replay_block]
fn double(x: &Tensor) -> Tensor {
    x * Self::BY
}

// becomes

fn double(x: &Tensor) -> Tensor {
    x * Self::BY
}
/// [`double`](Self::double) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `x`.
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
fn double_replay(
    rollout: &::replay_runtime::Rollout<'_>,
    x: &Tensor,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "double",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &["x"],
        "Tensor",
        false,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    let (__replay_input_x, __replay_form_x) = ::replay_runtime::private::input(&x);
    ::replay_runtime::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::NO_UNIT,
        &[__replay_input_x],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::double(
                ::replay_runtime::private::next_input(
                    __replay_form_x,
                    &mut __replay_leaves,
                ),
            )
        },
    )
}
