//! What stands in for a sibling that could not be made: something its callers compile against, so that one mistake
//! in a block is one error and not one per call.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{FnArg, Pat, ReturnType, Type, Visibility};

use crate::args::BlockArgs;
use crate::carried;
use crate::model::{CratePath, default_name, unraw};
use crate::signature::Method;
use crate::types::{self, Borrows};

/// ```text
/// Input:   fn step(&mut self, state: &Tensor) -> Tensor { .. }
/// Output:  fn step_replay(&mut self, _: &Rollout<'_>, state: &Tensor) -> Result<Tensor, ReplayError> { unreachable!() }
/// ```
///
/// `None` where the signature is too far from that of a block.
pub(crate) fn sibling(method: &Method, args: &BlockArgs, vis: &Visibility) -> Option<TokenStream> {
    let sig = &method.sig;
    let name = match &args.name {
        Some(name) if name.value() != unraw(&sig.ident) => name.parse().ok()?,
        _ => default_name(&sig.ident),
    };
    let value = value(&sig.output)?;
    let krate = CratePath(args.krate.clone());
    let attrs = carried::by_sibling(&method.conditions, &method.attrs);
    let receiver = sig.receiver().map(|receiver| {
        let mut receiver = receiver.clone();
        receiver.attrs.clear();
        quote!(#receiver,)
    });
    let parameters = sig.inputs.iter().filter_map(parameter);
    let (generics, _, where_clause) = sig.generics.split_for_impl();
    Some(quote! {
        #(#attrs)*
        #[doc(hidden)]
        #[allow(dead_code, unused_variables, clippy::all, clippy::pedantic, reason = "stands in for a block with errors")]
        #vis fn #name #generics (#receiver _: &#krate::Rollout<'_>, #(#parameters),*)
            -> ::core::result::Result<#value, #krate::ReplayError>
        #where_clause
        {
            ::core::unreachable!()
        }
    })
}

fn parameter(input: &FnArg) -> Option<TokenStream> {
    let FnArg::Typed(typed) = input else { return None };
    if types::rollout_ref(&typed.ty).is_some() {
        return None;
    }
    let (cfgs, ty) = (carried::by_argument(&typed.attrs), &typed.ty);
    let name = if let Pat::Ident(pat) = &*typed.pat { pat.ident.to_token_stream() } else { quote!(_) };
    Some(quote!(#(#cfgs)* #name: #ty))
}

/// The type inside the `Ok`. A borrow would elide another lifetime here, and an `impl Trait` needs a value.
fn value(output: &ReturnType) -> Option<TokenStream> {
    let ReturnType::Type(_, ty) = output else { return Some(quote!(())) };
    let ty = types::peel(ty);
    let plain = !matches!(ty, Type::ImplTrait(_)) && Borrows::of(ty).references.is_empty();
    let value = if types::is_named(ty, "Result") { types::arguments(ty).first().copied()? } else { ty };
    plain.then(|| quote!(#value))
}
