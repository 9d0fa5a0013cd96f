#[replay_block]
impl<L> nn::Module for Net<L>
where
    L: nn::Module,
{
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.layer.forward(xs)
    }
}

// becomes

impl<L> nn::Module for Net<L>
where
    L: nn::Module,
{
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.layer.forward(xs)
    }
}
#[allow(
    private_bounds,
    private_interfaces,
    reason = "a method of a trait is as visible as the trait, its sibling has to be public"
)]
impl<L> Net<L>
where
    L: nn::Module,
{
    /// `forward` run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
    /// runs the block again.
    ///
    /// Inputs: `xs`.
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
    pub fn forward_replay<'rollout>(
        &'rollout self,
        rollout: &::replay_runtime::Rollout<'rollout>,
        xs: &Tensor,
    ) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
        static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
            "Net::forward",
            ::core::module_path!(),
            ::core::file!(),
            ::core::line!(),
            &["xs"],
            "Tensor",
            false,
            false,
            false,
        );
        ::replay_runtime::private::inventory::submit! {
            ::replay_runtime::private::registration(& __REPLAY_BLOCK)
        }
        let (__replay_input_xs, __replay_form_xs) = ::replay_runtime::private::input(
            &xs,
        );
        ::replay_runtime::private::run(
            rollout,
            &__REPLAY_BLOCK,
            ::replay_runtime::private::unit(self),
            &[__replay_input_xs],
            ::replay_runtime::private::NoContext,
            move |_, __replay_leaves| {
                let mut __replay_leaves = __replay_leaves.iter();
                <Self as nn::Module>::forward(
                    self,
                    ::replay_runtime::private::next_input(
                        __replay_form_xs,
                        &mut __replay_leaves,
                    ),
                )
            },
        )
    }
}
