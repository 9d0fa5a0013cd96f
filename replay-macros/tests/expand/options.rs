#[replay_block(name = "again", context = Self::scope, buffers, crate = ::facade::replay)]
fn step(&self, x: &Tensor) -> Tensor {
    x.shallow_clone()
}

// becomes

fn step(&self, x: &Tensor) -> Tensor {
    x.shallow_clone()
}
/// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `x`.
///
/// Forward and replay run inside the context that `Self::scope` makes.
///
/// The block may update non-trainable variables: the forward does, its replay does not again.
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
fn again<'rollout>(
    &'rollout self,
    rollout: &::facade::replay::Rollout<'rollout>,
    x: &Tensor,
) -> ::core::result::Result<Tensor, ::facade::replay::ReplayError> {
    static __REPLAY_BLOCK: ::facade::replay::BlockInfo = ::facade::replay::private::block_info(
        "step",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &["x"],
        "Tensor",
        false,
        true,
        false,
    );
    ::facade::replay::private::inventory::submit! {
        ::facade::replay::private::registration(& __REPLAY_BLOCK)
    }
    let (__replay_input_x, __replay_form_x) = ::facade::replay::private::input(&x);
    ::facade::replay::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::facade::replay::private::unit(self),
        &[__replay_input_x],
        Self::scope(self),
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::step(
                self,
                ::facade::replay::private::next_input(
                    __replay_form_x,
                    &mut __replay_leaves,
                ),
            )
        },
    )
}
