//! Accepted forms of the attribute: each module compiles one aspect, and runs it where that is cheap.
//!
//! Ordinary code instead of trybuild's `pass` cases, which could not find LibTorch when run.
#![allow(
    clippy::assign_op_pattern,
    clippy::elidable_lifetime_names,
    clippy::float_cmp,
    clippy::many_single_char_names,
    clippy::needless_pass_by_value,
    clippy::trivially_copy_pass_by_ref,
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the shape of the methods is what is tested, their values are exact, and `+=` would write into an input"
)]

extern crate replay_runtime as renamed;

/// `$body` with a fresh rollout called `$rollout`.
macro_rules! with_rollout {
    (|$rollout:ident| $body:expr) => {{
        let vs = ::tch::nn::VarStore::new(::tch::Device::Cpu);
        let $rollout = ::replay_runtime::Rollout::new(&vs);
        $body
    }};
}

#[path = "macro_pass/aliases.rs"]
mod aliases;
#[path = "macro_pass/associated.rs"]
mod associated;
#[path = "macro_pass/attributes.rs"]
mod attributes;
#[path = "macro_pass/buffers.rs"]
mod buffers;
#[path = "macro_pass/by_others.rs"]
mod by_others;
#[path = "macro_pass/carried.rs"]
mod carried;
#[path = "macro_pass/cfg_parameters.rs"]
mod cfg_parameters;
#[path = "macro_pass/context.rs"]
mod context;
#[path = "macro_pass/crate_path.rs"]
mod crate_path;
#[path = "macro_pass/forbid_unsafe.rs"]
mod forbid_unsafe;
#[path = "macro_pass/forms.rs"]
mod forms;
#[path = "macro_pass/generics.rs"]
mod generics;
#[path = "macro_pass/hygiene.rs"]
mod hygiene;
#[path = "macro_pass/impl_blocks.rs"]
mod impl_blocks;
#[path = "macro_pass/lifetimes.rs"]
mod lifetimes;
#[path = "macro_pass/lints.rs"]
mod lints;
#[path = "macro_pass/local.rs"]
mod local;
#[path = "macro_pass/macro_rules.rs"]
mod macro_rules;
#[path = "macro_pass/nested.rs"]
mod nested;
#[path = "macro_pass/no_prelude.rs"]
mod no_prelude;
#[path = "macro_pass/registry.rs"]
mod registry;
#[path = "macro_pass/results.rs"]
mod results;
#[path = "macro_pass/trait_impls.rs"]
mod trait_impls;
#[path = "macro_pass/trait_methods.rs"]
mod trait_methods;

/// The value of a tensor with one element.
fn value(tensor: &tch::Tensor) -> f64 {
    tensor.double_value(&[])
}

fn scalar(value: f64) -> tch::Tensor {
    tch::Tensor::from(value)
}
