//! The rules of the return type: a tensor, a flat tuple of tensors, or a `Result` of either.

use syn::{Ident, ReturnType, Type, TypeTuple};

use crate::diagnostics::Diagnostics;
use crate::model::{Output, Value};
use crate::types::{self, Form};

const MAX_OUTPUTS: usize = 12;
const ACCEPTED: &str = "return `Tensor`, a tuple of `Tensor`, or a `Result` of either";

/// The output, where its text does not speak against it.
pub(crate) fn check(output: &ReturnType, method: &Ident, diagnostics: &mut Diagnostics) -> Option<Output> {
    let ReturnType::Type(_, declared) = output else {
        diagnostics.error(method, format!("a replay block has a tensor output; {ACCEPTED}"));
        return None;
    };
    let before = diagnostics.len();
    let ty = types::peel(declared);
    let value = match types::arguments(ty)[..] {
        // An alias may hide the tensor, and even put its error first.
        [] if types::is_named(ty, "Result") => Value::Projected,
        [ok, ..] if types::is_named(ty, "Result") => {
            check_value(ok, diagnostics);
            shown(types::peel(ok))
        }
        _ => {
            check_value(ty, diagnostics);
            shown(ty)
        }
    };
    (diagnostics.len() == before).then(|| Output { declared: (**declared).clone(), value })
}

fn shown(ty: &Type) -> Value {
    let known = types::is_tensor(ty) || matches!(ty, Type::Tuple(_));
    if known { Value::Shown(Box::new(ty.clone())) } else { Value::Projected }
}

fn check_value(ty: &Type, diagnostics: &mut Diagnostics) {
    match types::peel(ty) {
        Type::Tuple(tuple) => check_tuple(tuple, diagnostics),
        ty if types::is_named(ty, "Result") => {
            diagnostics.error(ty, format!("a replay block returns one `Result` at most; {ACCEPTED}"));
        }
        ty => check_element(ty, diagnostics),
    }
}

fn check_tuple(tuple: &TypeTuple, diagnostics: &mut Diagnostics) {
    if tuple.elems.is_empty() {
        diagnostics.error(tuple, format!("a replay block has a tensor output; {ACCEPTED}"));
    }
    if tuple.elems.len() > MAX_OUTPUTS {
        diagnostics.error(
            tuple,
            format!("a replay block has {MAX_OUTPUTS} outputs at most; stack some of them into one tensor"),
        );
    }
    for element in &tuple.elems {
        check_element(types::peel(element), diagnostics);
    }
}

fn check_element(ty: &Type, diagnostics: &mut Diagnostics) {
    match ty {
        Type::Tuple(_) => diagnostics.error(ty, "the outputs of a replay block are one flat tuple; take the inner tuple apart"),
        ty if types::is_named(ty, "Result") => {
            diagnostics.error(ty, format!("a replay block returns its `Result` outside the tuple; {ACCEPTED}"));
        }
        Type::ImplTrait(_) => diagnostics.error(ty, format!("a replay block names its output type; {ACCEPTED}")),
        Type::Reference(_) => diagnostics.error(
            ty,
            "a replay block cannot return a borrow: its replay computes the output anew; return `Tensor` (`shallow_clone` shares storage)",
        ),
        Type::Path(_) if types::is_named(ty, "Option") => diagnostics.error(
            ty,
            "an output of a replay block is always there; return `Tensor` (an empty or zero one where there is no value)",
        ),
        _ => check_form(ty, diagnostics),
    }
}

fn check_form(ty: &Type, diagnostics: &mut Diagnostics) {
    match types::form(ty) {
        Form::Container => diagnostics.error(
            ty,
            "an output of a replay block is one tensor, not a container; return a tuple of `Tensor`, or stack them into one",
        ),
        Form::Data => diagnostics.error(
            ty,
            "an output of a replay block is a tensor; compute other values outside the block, or return them as tensors",
        ),
        Form::Tensor | Form::Unknown => {}
    }
}
