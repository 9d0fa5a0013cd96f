#[replay_block]
fn outer<'m>(&'m self, x: &Tensor, run: &rollouts::Rollout<'m>) -> Result<Tensor, ReplayError> {
    self.step_replay(run, x)
}

// becomes

fn outer<'m>(
    &'m self,
    x: &Tensor,
    run: &rollouts::Rollout<'m>,
) -> Result<Tensor, ReplayError> {
    self.step_replay(run, x)
}
/// [`outer`](Self::outer) run as a replay block of `run`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `x`.
///
/// The block runs other blocks; they run again inside its replay.
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
fn outer_replay<'m>(
    &'m self,
    run: &rollouts::Rollout<'m>,
    x: &Tensor,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "outer",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &["x"],
        "Result<Tensor, ReplayError>",
        true,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    let (__replay_input_x, __replay_form_x) = ::replay_runtime::private::input(&x);
    ::replay_runtime::private::run(
        run,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[__replay_input_x],
        ::replay_runtime::private::NoContext,
        move |__replay_rollout, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::outer(
                self,
                ::replay_runtime::private::next_input(
                    __replay_form_x,
                    &mut __replay_leaves,
                ),
                __replay_rollout,
            )
        },
    )
}
