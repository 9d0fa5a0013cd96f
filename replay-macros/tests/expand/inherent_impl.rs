#[replay_block(crate = ::facade)]
impl<T: Layer> World<T> {
    #![allow(dead_code)]
    const DEPTH: usize = 2;

    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x.shallow_clone()
    }

    fn plain(&self) {}
}

// becomes

impl<T: Layer> World<T> {
    #![allow(dead_code)]
    const DEPTH: usize = 2;
    fn step(&self, x: &Tensor) -> Tensor {
        x.shallow_clone()
    }
    /// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
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
    fn step_replay<'rollout>(
        &'rollout self,
        rollout: &::facade::Rollout<'rollout>,
        x: &Tensor,
    ) -> ::core::result::Result<Tensor, ::facade::ReplayError> {
        static __REPLAY_BLOCK: ::facade::BlockInfo = ::facade::private::block_info(
            "World::step",
            ::core::module_path!(),
            ::core::file!(),
            ::core::line!(),
            &["x"],
            "Tensor",
            false,
            false,
            false,
        );
        ::facade::private::inventory::submit! {
            ::facade::private::registration(& __REPLAY_BLOCK)
        }
        let (__replay_input_x, __replay_form_x) = ::facade::private::input(&x);
        ::facade::private::run(
            rollout,
            &__REPLAY_BLOCK,
            ::facade::private::unit(self),
            &[__replay_input_x],
            ::facade::private::NoContext,
            move |_, __replay_leaves| {
                let mut __replay_leaves = __replay_leaves.iter();
                Self::step(
                    self,
                    ::facade::private::next_input(__replay_form_x, &mut __replay_leaves),
                )
            },
        )
    }
    fn plain(&self) {}
}
