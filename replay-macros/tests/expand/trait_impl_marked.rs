#[replay_block]
#[inline]
#[allow(deprecated)]
impl<'a> Dynamics<f64> for World<'a> {
    #![expect(nonstandard_style)]

    type Noise = f64;

    #[replay_block(name = "again")]
    fn step(&self, state: &Tensor, #[meta] noise: Self::Noise) -> Tensor {
        state + noise
    }

    fn reset(&self) -> Tensor {
        Tensor::new()
    }
}

// becomes

#[inline]
#[allow(deprecated)]
impl<'a> Dynamics<f64> for World<'a> {
    #![expect(nonstandard_style)]
    type Noise = f64;
    fn step(&self, state: &Tensor, noise: Self::Noise) -> Tensor {
        state + noise
    }
    fn reset(&self) -> Tensor {
        Tensor::new()
    }
}
#[allow(deprecated)]
#[allow(nonstandard_style)]
#[allow(
    private_bounds,
    private_interfaces,
    reason = "a method of a trait is as visible as the trait, its sibling has to be public"
)]
impl<'a> World<'a> {
    /// `step` run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
    /// runs the block again.
    ///
    /// Inputs: `state`.
    ///
    /// Data, kept as a copy: `noise`.
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
    pub fn again<'rollout>(
        &'rollout self,
        rollout: &::replay_runtime::Rollout<'rollout>,
        state: &Tensor,
        noise: <Self as Dynamics<f64>>::Noise,
    ) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
        static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
            "World::step",
            ::core::module_path!(),
            ::core::file!(),
            ::core::line!(),
            &["state"],
            "Tensor",
            false,
            false,
            false,
        );
        ::replay_runtime::private::inventory::submit! {
            ::replay_runtime::private::registration(& __REPLAY_BLOCK)
        }
        let () = ::replay_runtime::private::assert_meta(&noise);
        let (__replay_input_state, __replay_form_state) = ::replay_runtime::private::input(
            &state,
        );
        ::replay_runtime::private::run(
            rollout,
            &__REPLAY_BLOCK,
            ::replay_runtime::private::unit(self),
            &[__replay_input_state],
            ::replay_runtime::private::NoContext,
            move |_, __replay_leaves| {
                let mut __replay_leaves = __replay_leaves.iter();
                <Self as Dynamics<
                    f64,
                >>::step(
                    self,
                    ::replay_runtime::private::next_input(
                        __replay_form_state,
                        &mut __replay_leaves,
                    ),
                    ::core::clone::Clone::clone(&noise),
                )
            },
        )
    }
}
