//! How long the block must live: the lifetime that the sibling gives to its receiver and to the rollout.

use proc_macro2::Span;
use quote::ToTokens;
use syn::{FnArg, GenericParam, Generics, Lifetime, LifetimeParam, Signature};

use crate::diagnostics::Diagnostics;
use crate::model::{Parameter, Role};
use crate::{receiver, types};

pub(crate) struct Lifetimes {
    pub(crate) rollout: Lifetime,
    /// The sibling's generics.
    pub(crate) generics: Generics,
}

/// Chooses the lifetime, and checks that the inputs do not ask for more than a replay can give.
pub(crate) fn check(sig: &Signature, parameters: &[Parameter], diagnostics: &mut Diagnostics) -> Lifetimes {
    let nested = rollout_parameter(sig, parameters, diagnostics);
    check_inputs(sig, parameters, nested.as_ref(), diagnostics);
    let mut generics = sig.generics.clone();
    if let Some(rollout) = nested {
        return Lifetimes { rollout, generics };
    }
    let rollout = match (sig.receiver(), receiver::lifetime(sig)) {
        (None, _) => Lifetime::new("'_", Span::mixed_site()),
        (Some(_), Some(outer)) if !declares(&sig.generics, outer) => outer.clone(),
        (Some(_), own) => {
            if let Some(own) = own {
                drop_if_unused(sig, own, &mut generics);
            }
            let rollout = fresh(sig);
            generics.params.insert(0, GenericParam::Lifetime(LifetimeParam::new(rollout.clone())));
            rollout
        }
    };
    Lifetimes { rollout, generics }
}

/// `fn f<'m>(&'m self, rollout: &Rollout<'m>, ..)`: the lifetime `'m` of a block that runs other blocks.
fn rollout_parameter(sig: &Signature, parameters: &[Parameter], diagnostics: &mut Diagnostics) -> Option<Lifetime> {
    let mut rollouts = parameters.iter().filter(|parameter| matches!(parameter.role, Role::Rollout));
    let first = rollouts.next()?;
    for second in rollouts {
        diagnostics.error(&second.ty, "a replay block belongs to one rollout; remove the second rollout parameter");
    }
    let lifetime = types::rollout_ref(&first.ty).and_then(|found| found.lifetime);
    let Some(lifetime) = lifetime else {
        let usage = if sig.receiver().is_some() {
            "write `fn name<'m>(&'m self, rollout: &Rollout<'m>, ..)`"
        } else {
            "write `fn name<'m>(rollout: &Rollout<'m>, ..)`"
        };
        diagnostics
            .error(&first.ty, format!("a block that runs blocks must name the lifetime of its rollout; {usage}"));
        return None;
    };
    if let Some(FnArg::Receiver(receiver)) = sig.inputs.first()
        && receiver::lifetime(sig) != Some(&lifetime)
    {
        diagnostics.error(
            receiver,
            format!("the blocks inside outlive this call, so the receiver must live as long as the rollout; write `&{lifetime} self`"),
        );
    }
    Some(lifetime)
}

/// A replay hands out tensors for the time of one call.
fn check_inputs(sig: &Signature, parameters: &[Parameter], nested: Option<&Lifetime>, diagnostics: &mut Diagnostics) {
    let inputs = parameters.iter().filter(|parameter| matches!(parameter.role, Role::Input));
    for lifetime in inputs.flat_map(|input| types::Borrows::of(&input.ty).lifetimes) {
        let free = declares(&sig.generics, lifetime) && Some(lifetime) != nested;
        if lifetime.ident != "_" && !free {
            diagnostics.error(
                lifetime,
                format!("a replay passes tensors that live for one call only; remove `{lifetime}` from this input"),
            );
        }
    }
}

fn declares(generics: &Generics, lifetime: &Lifetime) -> bool {
    generics.lifetimes().any(|param| param.lifetime == *lifetime)
}

/// Once the receiver has another lifetime, its own may be left without a use.
fn drop_if_unused(sig: &Signature, own: &Lifetime, generics: &mut Generics) {
    let inputs = sig.inputs.iter().skip(1).map(ToTokens::to_token_stream);
    let others = generics.params.iter().filter(|param| !is_param(param, own)).map(ToTokens::to_token_stream);
    let clause = generics.where_clause.to_token_stream();
    let mut rest = inputs.chain(others).chain([clause]);
    if !rest.any(|tokens| mentions(tokens, own)) {
        generics.params = generics.params.iter().filter(|param| !is_param(param, own)).cloned().collect();
    }
}

fn is_param(param: &GenericParam, lifetime: &Lifetime) -> bool {
    matches!(param, GenericParam::Lifetime(param) if param.lifetime == *lifetime)
}

/// A lifetime is a `'` and an identifier; a label of the same name does no harm here.
fn mentions(tokens: impl ToTokens, lifetime: &Lifetime) -> bool {
    types::mentions(tokens, &lifetime.ident.to_string())
}

/// `'rollout`, unless the signature has one.
fn fresh(sig: &Signature) -> Lifetime {
    let mut name = "'rollout".to_owned();
    while mentions(&sig.generics, &Lifetime::new(&name, Span::call_site()))
        || sig.inputs.iter().any(|input| input_borrows(input, &name))
    {
        name.push('_');
    }
    Lifetime::new(&name, Span::mixed_site())
}

fn input_borrows(input: &FnArg, name: &str) -> bool {
    let (FnArg::Receiver(syn::Receiver { ty, .. }) | FnArg::Typed(syn::PatType { ty, .. })) = input;
    types::Borrows::of(ty).lifetimes.iter().any(|lifetime| lifetime.to_string() == name)
}
