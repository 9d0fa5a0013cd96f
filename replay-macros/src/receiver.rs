//! The rules of the receiver: `&self`, `self: &Self`, or none.

use syn::{FnArg, Lifetime, Signature, Type};

use crate::diagnostics::Diagnostics;
use crate::model::Receiver;
use crate::types;

/// The receiver, where there is one and it is a shared reference.
pub(crate) fn check(sig: &Signature, diagnostics: &mut Diagnostics) -> Option<Receiver> {
    let Some(FnArg::Receiver(receiver)) = sig.inputs.first() else { return None };
    match types::peel(&receiver.ty) {
        Type::Reference(reference) if reference.mutability.is_some() => diagnostics.error(
            receiver,
            "a replay block runs twice, so it cannot take `&mut self`; take `&self`, and return what changes as outputs",
        ),
        Type::Reference(reference) if types::is_named(&reference.elem, "Self") => {}
        ty if receiver.colon_token.is_none() || types::is_named(ty, "Self") => diagnostics.error(
            receiver,
            "a replay block runs twice, so it cannot take `self` by value; take `&self`",
        ),
        ty => diagnostics.error(ty, "a replay block cannot take this kind of `self` in this version; take `&self`"),
    }
    Some(Receiver { self_token: receiver.self_token })
}

/// The lifetime written on the receiver.
pub(crate) fn lifetime(sig: &Signature) -> Option<&Lifetime> {
    let Some(FnArg::Receiver(receiver)) = sig.inputs.first() else { return None };
    match (&receiver.reference, types::peel(&receiver.ty)) {
        (Some((_, lifetime)), _) => lifetime.as_ref(),
        (None, Type::Reference(reference)) => reference.lifetime.as_ref(),
        _ => None,
    }
    .filter(|lifetime| lifetime.ident != "_")
}
