#[replay_block]
fn step<'a, const K: usize, N: Into<f64>>(&'a self, x: &'a Tensor, #[meta] n: N) -> Tensor
where
    N: Clone + Send + 'static,
{
    x.shallow_clone()
}

// becomes

fn step<'a, const K: usize, N: Into<f64>>(&'a self, x: &'a Tensor, n: N) -> Tensor
where
    N: Clone + Send + 'static,
{
    x.shallow_clone()
}
/// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `x`.
///
/// Data, kept as a copy: `n`.
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
fn step_replay<'rollout, 'a, const K: usize, N: Into<f64>>(
    &'rollout self,
    rollout: &::replay_runtime::Rollout<'rollout>,
    x: &'a Tensor,
    n: N,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError>
where
    N: Clone + Send + 'static,
{
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "step",
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
    let () = ::replay_runtime::private::assert_meta(&n);
    let (__replay_input_x, __replay_form_x) = ::replay_runtime::private::input(&x);
    ::replay_runtime::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[__replay_input_x],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::step::<
                K,
                N,
            >(
                self,
                ::replay_runtime::private::next_input(
                    __replay_form_x,
                    &mut __replay_leaves,
                ),
                ::core::clone::Clone::clone(&n),
            )
        },
    )
}
