//! The rules of the parameters: tensor inputs, `#[meta]` data and the rollout.

use syn::{Attribute, FnArg, Generics, Ident, Meta, Pat, PatType, Signature, Type};

use crate::carried;
use crate::diagnostics::Diagnostics;
use crate::model::{Parameter, Role};
use crate::signature::meta_mark;
use crate::types::{self, Borrows, Form};

/// The parameters that pass; each that does not has left an error.
pub(crate) fn check(sig: &Signature, diagnostics: &mut Diagnostics) -> Vec<Parameter> {
    let mut parameters = Vec::new();
    for input in &sig.inputs {
        match input {
            FnArg::Receiver(receiver) => check_receiver_attrs(&receiver.attrs, diagnostics),
            FnArg::Typed(typed) => parameters.extend(parameter(typed, &sig.generics, diagnostics)),
        }
    }
    parameters
}

fn check_receiver_attrs(attrs: &[Attribute], diagnostics: &mut Diagnostics) {
    for attr in attrs.iter().filter(|attr| meta_mark(attr).is_some()) {
        diagnostics.error(attr, "`#[meta]` marks data; the receiver is borrowed by the rollout, remove the mark");
    }
}

fn parameter(typed: &PatType, generics: &Generics, diagnostics: &mut Diagnostics) -> Option<Parameter> {
    let before = diagnostics.len();
    check_attrs(&typed.attrs, diagnostics);
    let ident = name(&typed.pat, diagnostics);
    let role = role(typed, generics, diagnostics);
    let passed = diagnostics.len() == before;
    // The lint on needless parentheses has spoken about the method; it would again about the sibling.
    let mut ty = &*typed.ty;
    while let Type::Paren(inner) = ty {
        ty = &inner.elem;
    }
    passed.then_some(Parameter { ident: ident?, ty: ty.clone(), cfgs: carried::by_argument(&typed.attrs), role: role? })
}

fn check_attrs(attrs: &[Attribute], diagnostics: &mut Diagnostics) {
    let mut marks = attrs.iter().filter_map(|attr| Some((attr, meta_mark(attr)?)));
    if let Some((attr, mark)) = marks.next()
        && !matches!(mark, Meta::Path(_))
    {
        diagnostics.error(attr, "`#[meta]` takes no arguments; write `#[meta]`");
    }
    for (attr, _) in marks {
        diagnostics.error(attr, "`#[meta]` is given twice; keep one of them");
    }
}

/// The name that messages, reports and the registry use.
fn name(pat: &Pat, diagnostics: &mut Diagnostics) -> Option<Ident> {
    match pat {
        Pat::Ident(pat) if pat.by_ref.is_none() && pat.subpat.is_none() => Some(pat.ident.clone()),
        Pat::Wild(_) => {
            diagnostics.error(pat, "a parameter of a replay block goes by its name; write one, as in `_mask`");
            None
        }
        _ => {
            diagnostics.error(
                pat,
                "a parameter of a replay block goes by its name; write a plain name here and take it apart in the body",
            );
            None
        }
    }
}

fn role(typed: &PatType, generics: &Generics, diagnostics: &mut Diagnostics) -> Option<Role> {
    let ty = types::peel(&typed.ty);
    if let Some(mark) = typed.attrs.iter().find(|attr| meta_mark(attr).is_some()) {
        return check_meta(mark, ty, diagnostics).then_some(Role::Meta);
    }
    if types::rollout_ref(ty).is_some() {
        return Some(Role::Rollout);
    }
    if is_generic(ty, generics) {
        diagnostics.error(
            ty,
            format!("an input of a replay block has one type ({FORMS}), so that its replay can be given the same; write it, or mark data `#[meta]`"),
        );
        return None;
    }
    check_input(ty, diagnostics).then_some(Role::Input)
}

/// `impl Trait` or a type parameter, also inside a reference or an option: rustc would propose bounds that do not help.
fn is_generic(ty: &Type, generics: &Generics) -> bool {
    match types::peel(ty) {
        Type::ImplTrait(_) => true,
        Type::Reference(reference) => is_generic(&reference.elem, generics),
        Type::Path(path) if path.path.get_ident().is_some() => {
            generics.type_params().any(|param| path.path.is_ident(&param.ident))
        }
        ty if types::is_named(ty, "Option") => types::arguments(ty).iter().any(|inner| is_generic(inner, generics)),
        _ => false,
    }
}

fn check_meta(mark: &Attribute, ty: &Type, diagnostics: &mut Diagnostics) -> bool {
    if types::holds_tensor(ty) {
        diagnostics.error(
            mark,
            "`#[meta]` is for data: a tensor in it would get no gradient; remove the mark, and pass each tensor as its own parameter",
        );
        return false;
    }
    if types::rollout_ref(ty).is_some() {
        diagnostics.error(mark, "`#[meta]` is for data; the rollout is passed on by itself, remove the mark");
        return false;
    }
    let borrows = Borrows::of(ty);
    let outlives = |lifetime: &&&syn::Lifetime| lifetime.ident != "static";
    let lasts = |reference: &&&syn::TypeReference| {
        reference.mutability.is_none() && reference.lifetime.as_ref().is_some_and(|lifetime| lifetime.ident == "static")
    };
    if let Some(reference) = borrows.references.iter().find(|reference| !lasts(reference)) {
        diagnostics.error(
            *reference,
            "`#[meta]` data is kept until the replay, so it cannot be a reference; pass it owned, or as a `&'static` one",
        );
        return false;
    }
    if let Some(lifetime) = borrows.lifetimes.iter().find(outlives) {
        diagnostics.error(
            *lifetime,
            "`#[meta]` data is kept until the replay, so it cannot borrow; pass it owned, or as `'static`",
        );
        return false;
    }
    true
}

const FORMS: &str = "`&Tensor`, `Tensor`, `Option<&Tensor>` or `Option<Tensor>`";

/// Whether the text may be one of the four forms of a tensor input.
fn check_input(ty: &Type, diagnostics: &mut Diagnostics) -> bool {
    if is_input(ty) {
        return true;
    }
    match ty {
        Type::Reference(reference) if reference.mutability.is_some() && types::is_tensor(&reference.elem) => {
            diagnostics.error(
                ty,
                "a replay block runs twice, so it cannot change an input in place; take `&Tensor` and return the new value",
            );
        }
        Type::Reference(reference) if types::is_named(&reference.elem, "Option") && types::holds_tensor(ty) => {
            diagnostics.error(
                ty,
                "an optional input of a replay block is `Option<&Tensor>` or `Option<Tensor>`; write one of them",
            );
        }
        Type::Path(_) if types::is_named(ty, "Rollout") => {
            diagnostics.error(ty, "a block that runs blocks takes its rollout by reference; write `&Rollout<'m>`, or mark a type of your own `#[meta]`");
        }
        _ => return check_form(ty, diagnostics),
    }
    false
}

fn check_form(ty: &Type, diagnostics: &mut Diagnostics) -> bool {
    match types::form(ty) {
        Form::Container => diagnostics.error(
            ty,
            format!("an input of a replay block is one tensor ({FORMS}), not a container; pass each tensor as its own parameter, or stack them"),
        ),
        Form::Data => diagnostics.error(
            ty,
            format!("an input of a replay block is a tensor ({FORMS}); mark other data `#[meta]`, owned"),
        ),
        Form::Tensor | Form::Unknown => return true,
    }
    false
}

fn is_input(ty: &Type) -> bool {
    let shared = |ty: &Type| match types::peel(ty) {
        Type::Reference(reference) => reference.mutability.is_none() && types::is_tensor(&reference.elem),
        ty => types::is_tensor(ty),
    };
    let optional = types::is_named(ty, "Option") && matches!(types::arguments(ty)[..], [inner] if shared(inner));
    shared(ty) || optional
}
