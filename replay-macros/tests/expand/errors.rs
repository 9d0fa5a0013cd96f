#[replay_block(nam = "again")]
pub async fn step(&self, _: &Tensor, frame: i64, #[meta] y: &str) -> Vec<Tensor> {
    vec![]
}

// becomes

pub async fn step(&self, _: &Tensor, frame: i64, y: &str) -> Vec<Tensor> {
    vec![]
}
#[doc(hidden)]
#[allow(
    dead_code,
    unused_variables,
    clippy::all,
    clippy::pedantic,
    reason = "stands in for a block with errors"
)]
pub fn step_replay(
    &self,
    _: &::replay_runtime::Rollout<'_>,
    _: &Tensor,
    frame: i64,
    y: &str,
) -> ::core::result::Result<Vec<Tensor>, ::replay_runtime::ReplayError> {
    ::core::unreachable!()
}
::core::compile_error! {
    "`replay_block` has no option `nam` here; the options are `name = \"..\"`, `context = path`, `buffers`, `early_stop` and `crate = ::path`"
}
::core::compile_error! {
    "a replay block cannot be `async`: the backward pass runs it again and cannot await; await outside the block"
}
::core::compile_error! {
    "a parameter of a replay block goes by its name; write one, as in `_mask`"
}
::core::compile_error! {
    "an input of a replay block is a tensor (`&Tensor`, `Tensor`, `Option<&Tensor>` or `Option<Tensor>`); mark other data `#[meta]`, owned"
}
::core::compile_error! {
    "`#[meta]` data is kept until the replay, so it cannot be a reference; pass it owned, or as a `&'static` one"
}
::core::compile_error! {
    "an output of a replay block is one tensor, not a container; return a tuple of `Tensor`, or stack them into one"
}
