#[replay_block]
fn step(&self, a: &Tensor, mut b: Tensor, c: Option<&Tensor>, d: Option<Tensor>, e: State) -> Tensor {
    a.shallow_clone()
}

// becomes

fn step(
    &self,
    a: &Tensor,
    mut b: Tensor,
    c: Option<&Tensor>,
    d: Option<Tensor>,
    e: State,
) -> Tensor {
    a.shallow_clone()
}
/// [`step`](Self::step) run as a replay block of `rollout`: the forward pass keeps the inputs only, the backward pass
/// runs the block again.
///
/// Inputs: `a`, `b`, `c`, `d`, `e`.
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
    a: &Tensor,
    b: Tensor,
    c: Option<&Tensor>,
    d: Option<Tensor>,
    e: State,
) -> ::core::result::Result<Tensor, ::replay_runtime::ReplayError> {
    static __REPLAY_BLOCK: ::replay_runtime::BlockInfo = ::replay_runtime::private::block_info(
        "step",
        ::core::module_path!(),
        ::core::file!(),
        ::core::line!(),
        &["a", "b", "c", "d", "e"],
        "Tensor",
        false,
        false,
        false,
    );
    ::replay_runtime::private::inventory::submit! {
        ::replay_runtime::private::registration(& __REPLAY_BLOCK)
    }
    let (__replay_input_a, __replay_form_a) = ::replay_runtime::private::input(&a);
    let (__replay_input_b, __replay_form_b) = ::replay_runtime::private::input(&b);
    let (__replay_input_c, __replay_form_c) = ::replay_runtime::private::input(&c);
    let (__replay_input_d, __replay_form_d) = ::replay_runtime::private::input(&d);
    let (__replay_input_e, __replay_form_e) = ::replay_runtime::private::input(&e);
    ::replay_runtime::private::run(
        rollout,
        &__REPLAY_BLOCK,
        ::replay_runtime::private::unit(self),
        &[
            __replay_input_a,
            __replay_input_b,
            __replay_input_c,
            __replay_input_d,
            __replay_input_e,
        ],
        ::replay_runtime::private::NoContext,
        move |_, __replay_leaves| {
            let mut __replay_leaves = __replay_leaves.iter();
            Self::step(
                self,
                ::replay_runtime::private::next_input(
                    __replay_form_a,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_b,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_c,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_d,
                    &mut __replay_leaves,
                ),
                ::replay_runtime::private::next_input(
                    __replay_form_e,
                    &mut __replay_leaves,
                ),
            )
        },
    )
}
