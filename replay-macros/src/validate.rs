//! Signature and options to [`Block`], one small function per rule. A failed rule does not stop the others, so that
//! all errors of a block show in one compile. Where rustc says it better, nothing is said here.

use proc_macro2::Span;
use quote::format_ident;
use syn::{Ident, Signature};

use crate::args::BlockArgs;
use crate::diagnostics::Diagnostics;
use crate::lifetimes::{self, Lifetimes};
use crate::model::{Block, CratePath, Owner, Role, default_name, unraw};
use crate::signature::{Body, Method};
use crate::{carried, output, parameters, receiver, types};

/// Where the method stands.
pub(crate) enum Place {
    /// The attribute is on the method itself and sees nothing around it.
    Lone,
    /// Inside an impl block that carries the attribute; with the name of its type.
    Inherent(Option<Ident>),
    Trait(Option<Ident>, syn::Path),
}

/// Checks every rule; `None` when one failed.
pub(crate) fn block(method: &Method, args: &BlockArgs, place: &Place, diagnostics: &mut Diagnostics) -> Option<Block> {
    let before = diagnostics.len();
    let sig = &method.sig;
    let braces = check_body(method, diagnostics);
    check_modifiers(sig, diagnostics);
    let receiver = receiver::check(sig, diagnostics);
    let parameters = parameters::check(sig, diagnostics);
    check_any_input(sig, &parameters, diagnostics);
    let lifetimes = lifetimes::check(sig, &parameters, diagnostics);
    let output = output::check(&sig.output, &sig.ident, diagnostics);
    let sibling = sibling_name(sig, args, diagnostics);
    if diagnostics.len() > before {
        return None;
    }

    let Lifetimes { rollout: lifetime, generics } = lifetimes;
    Some(Block {
        function: sig.fn_token,
        braces: braces?,
        method: sig.ident.clone(),
        sibling: sibling?,
        vis: visibility(method, place),
        attrs: carried::by_sibling(&method.conditions, &method.attrs),
        generics,
        receiver,
        lifetime,
        rollout: rollout_name(&parameters),
        parameters,
        output: output?,
        context: args.context.clone(),
        buffers: args.buffers,
        early_stop: args.early_stop,
        owner: owner(method, place),
        krate: CratePath(args.krate.clone()),
    })
}

fn check_body(method: &Method, diagnostics: &mut Diagnostics) -> Option<Span> {
    match &method.body {
        Body::Braces(group) => Some(group.span()),
        Body::Missing(semi) => {
            diagnostics.error(semi, "a replay block needs a body; put `#[replay_block]` on the impl of the trait");
            None
        }
    }
}

fn check_modifiers(sig: &Signature, diagnostics: &mut Diagnostics) {
    if let Some(token) = &sig.constness {
        diagnostics.error(token, "a replay block cannot be `const`: it records tensors at run time; remove `const`");
    }
    if let Some(token) = &sig.asyncness {
        diagnostics.error(
            token,
            "a replay block cannot be `async`: the backward pass runs it again and cannot await; await outside the block",
        );
    }
    if let Some(token) = &sig.unsafety {
        diagnostics.error(
            token,
            "a replay block cannot be `unsafe`: its replay would run without the caller's proof; put `unsafe` into the body",
        );
    }
    if let Some(abi) = &sig.abi {
        diagnostics.error(abi, "a replay block is called from Rust only; remove the `extern`");
    }
    if let Some(variadic) = &sig.variadic {
        diagnostics.error(variadic, "a replay block cannot be variadic; name each input");
    }
}

fn check_any_input(sig: &Signature, parameters: &[crate::model::Parameter], diagnostics: &mut Diagnostics) {
    // A parameter that failed may have been meant as the input: say nothing then.
    let typed = sig.inputs.iter().filter(|input| matches!(input, syn::FnArg::Typed(_))).count();
    let any = parameters.iter().any(|parameter| matches!(parameter.role, Role::Input));
    if !any && parameters.len() == typed {
        diagnostics.error(
            &sig.ident,
            "a replay block needs a tensor input; without one there is nothing to keep, call the function as it is",
        );
    }
}

fn sibling_name(sig: &Signature, args: &BlockArgs, diagnostics: &mut Diagnostics) -> Option<Ident> {
    let Some(name) = &args.name else {
        return Some(default_name(&sig.ident));
    };
    if name.value() == unraw(&sig.ident) {
        diagnostics.error(name, "option `name` is the method's own name; choose another for the replaying method");
        return None;
    }
    let Ok(ident) = name.parse::<Ident>() else {
        diagnostics.error(name, "option `name` must be an identifier, as in `name = \"step_again\"`");
        return None;
    };
    Some(ident)
}

/// `rollout`, unless an input has that name.
fn rollout_name(parameters: &[crate::model::Parameter]) -> Ident {
    let taken = |name: &Ident| parameters.iter().any(|parameter| parameter.ident == *name);
    let mut name = format_ident!("rollout");
    while taken(&name) {
        name = format_ident!("replay_{name}");
    }
    name
}

pub(crate) fn visibility(method: &Method, place: &Place) -> syn::Visibility {
    match place {
        Place::Trait(..) => syn::Visibility::Public(syn::token::Pub::default()),
        _ => method.vis.clone(),
    }
}

fn owner(method: &Method, place: &Place) -> Owner {
    match place {
        Place::Inherent(name) => Owner::Inherent(name.clone()),
        Place::Trait(name, path) => Owner::Trait(name.clone(), path.clone()),
        Place::Lone if is_associated(method) => Owner::Inherent(None),
        Place::Lone => Owner::Free,
    }
}

/// A lone attribute cannot see an impl around it; `Self` or a receiver gives it away.
fn is_associated(method: &Method) -> bool {
    let body = match &method.body {
        Body::Braces(group) => types::mentions(group, "Self"),
        Body::Missing(_) => false,
    };
    body || method.sig.receiver().is_some() || types::mentions(&method.sig, "Self")
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
