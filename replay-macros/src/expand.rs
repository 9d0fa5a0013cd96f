//! [`Block`] to tokens: the sibling that runs the method as a block of a rollout.
//!
//! Every local is a mixed-site identifier and every path is absolute, so neither the names of the user's parameters
//! nor what is in scope matter. What can fail to type-check carries the span of the type it is about.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{GenericParam, Generics, Path, Type};

use crate::docs;
use crate::model::{Block, Owner, Parameter, Role, Value};

/// ```text
/// Input:   fn step(&self, state: &Tensor, #[meta] frame: i64) -> Tensor { .. }
/// Output:  fn step_replay<'rollout>(&'rollout self, rollout: &Rollout<'rollout>, state: &Tensor, frame: i64)
///              -> Result<Tensor, ReplayError> { body(..) }
/// ```
pub(crate) fn sibling(block: &Block) -> TokenStream {
    let Block { sibling, vis, attrs, krate, lifetime, rollout, .. } = block;
    let docs = docs::of(block);
    let allow = allow(block);
    let (generics, _, where_clause) = block.generics.split_for_impl();
    let receiver = block.receiver.as_ref().map(|receiver| {
        let token = receiver.self_token;
        quote!(&#lifetime #token,)
    });
    let own_rollout = (!block.nested()).then(|| quote!(#rollout: &#krate::Rollout<#lifetime>,));
    let passed = rollout_first(block).map(|Parameter { ident, ty, cfgs, .. }| quote!(#(#cfgs)* #ident: #ty));
    let output = output(block);
    // `dead_code` is silent about an item that starts or ends in generated tokens.
    let function = block.function;
    let mut body = Group::new(Delimiter::Brace, body(block));
    body.set_span(block.braces);
    quote! {
        #(#attrs)*
        #docs
        #allow
        #vis #function #sibling #generics (#receiver #own_rollout #(#passed),*)
            -> #output
        #where_clause
        #body
    }
}

/// The sibling takes the rollout first, wherever the method has it.
fn rollout_first(block: &Block) -> impl Iterator<Item = &Parameter> {
    let is_rollout = |parameter: &&Parameter| matches!(parameter.role, Role::Rollout);
    let others = block.parameters.iter().filter(move |parameter| !is_rollout(parameter));
    block.parameters.iter().filter(is_rollout).chain(others)
}

fn output(block: &Block) -> TokenStream {
    let krate = &block.krate;
    match &block.output.value {
        Value::Shown(ty) => quote!(::core::result::Result<#ty, #krate::ReplayError>),
        Value::Projected => {
            let declared = &block.output.declared;
            let value = quote!(<#declared as #krate::ReplayOutput>::Value);
            at(quote!(::core::result::Result<#value, #krate::ReplayError>), declared.span())
        }
    }
}

/// Lints that would say about the sibling what they already said about the method, or what the user cannot change.
fn allow(block: &Block) -> TokenStream {
    // Only where it speaks: a crate that forbids a lint cannot be told to allow it.
    let names = block.parameters.iter().map(|parameter| &parameter.ident).chain([&block.method]);
    let capitals = names.into_iter().any(|name| name.to_string().contains(char::is_uppercase));
    let non_snake_case = capitals.then(|| quote!(non_snake_case,));
    quote! {
        #[allow(
            #non_snake_case
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
    }
}

/// ```text
/// Output:  static BLOCK: BlockInfo = block_info("step", .., &["state"], "Tensor", false, false);
///          inventory::submit! { registration(&BLOCK) }
///          assert_meta(&frame);
///          let (input_state, form_state) = input(&state);
///          run(rollout, &BLOCK, unit(self), &[input_state], NoContext, move |_, leaves| {
///              let mut leaves = leaves.iter();
///              Self::step(self, next_input(form_state, &mut leaves), frame.clone())
///          })
/// ```
fn body(block: &Block) -> TokenStream {
    let Block { krate, .. } = block;
    let leaves = local("leaves");
    let rollout = block.parameters.iter().find(|parameter| matches!(parameter.role, Role::Rollout));
    let rollout = rollout.map_or(&block.rollout, |parameter| &parameter.ident);
    let registration = registration(block);
    let metas = block.metas().map(|Parameter { ident, ty, cfgs, .. }| {
        let call = spanned_call(&at(quote!(#krate::private::assert_meta), ends(ty).0), ident, ty);
        quote!(#(#cfgs)* let () = #call;)
    });
    let tensors = block.inputs().map(|Parameter { ident, ty, cfgs, .. }| {
        let (input, form) = (input_local(ident), form_local(ident));
        let call = spanned_call(&written_at(quote!(#krate::private::input), ty), ident, ty);
        quote!(#(#cfgs)* let (#input, #form) = #call;)
    });
    let list = block.inputs().map(|Parameter { ident, cfgs, .. }| {
        let input = input_local(ident);
        quote!(#(#cfgs)* #input)
    });
    let (context, unit) = (context(block), unit(block));
    let handle = if block.nested() { local("rollout").to_token_stream() } else { quote!(_) };
    let call = call(block, &leaves);
    let arguments = quote! {
        (#rollout, &__REPLAY_BLOCK, #unit, &[#(#list),*], #context, move |#handle, #leaves| {
            let mut #leaves = #leaves.iter();
            #call
        })
    };
    let place = block.output.declared.span();
    let (run, arguments) = (at(quote!(#krate::private::run), place), at(arguments, place));
    quote! {
        #registration
        #(#metas)*
        #(#tensors)*
        #run #arguments
    }
}

fn registration(block: &Block) -> TokenStream {
    let krate = &block.krate;
    let name = block.name();
    let outputs = docs::type_text(&block.output.declared);
    let (nested, buffers, early_stop) = (block.nested(), block.buffers, block.early_stop);
    let inputs = block.inputs().map(|Parameter { ident, cfgs, .. }| {
        let name = crate::model::unraw(ident);
        quote!(#(#cfgs)* #name)
    });
    quote! {
        static __REPLAY_BLOCK: #krate::BlockInfo = #krate::private::block_info(
            #name,
            ::core::module_path!(),
            ::core::file!(),
            ::core::line!(),
            &[#(#inputs),*],
            #outputs,
            #nested,
            #buffers,
            #early_stop,
        );
        #krate::private::inventory::submit! { #krate::private::registration(&__REPLAY_BLOCK) }
    }
}

/// The object whose parameters the block has, where there is one.
fn unit(block: &Block) -> TokenStream {
    let krate = &block.krate;
    let receiver = block.receiver.as_ref().map(|receiver| receiver.self_token);
    receiver.map_or_else(|| quote!(#krate::private::NO_UNIT), |receiver| quote!(#krate::private::unit(#receiver)))
}

/// `context = path` is called in the forward, with the receiver where there is one.
fn context(block: &Block) -> TokenStream {
    let krate = &block.krate;
    let receiver = block.receiver.as_ref().map(|receiver| receiver.self_token);
    block.context.as_ref().map_or_else(|| quote!(#krate::private::NoContext), |path| quote!(#path(#receiver)))
}

/// ```text
/// Output:  Self::step::<K, N>(self, next_input(form_state, &mut leaves), Clone::clone(&frame))
/// ```
fn call(block: &Block, leaves: &Ident) -> TokenStream {
    let krate = &block.krate;
    let path = callee(block);
    let turbofish = turbofish(&block.generics);
    let receiver = block.receiver.as_ref().map(|receiver| {
        let token = receiver.self_token;
        quote!(#token,)
    });
    let arguments = block.parameters.iter().map(|Parameter { ident, ty, cfgs, role }| {
        let argument = match role {
            Role::Input => {
                let form = form_local(ident);
                quote!(#krate::private::next_input(#form, &mut #leaves))
            }
            Role::Meta => spanned_call(&at(quote!(::core::clone::Clone::clone), ends(ty).0), ident, ty),
            Role::Rollout => local("rollout").to_token_stream(),
        };
        quote!(#(#cfgs)* #argument)
    });
    quote!(#path #turbofish (#receiver #(#arguments),*))
}

fn callee(block: &Block) -> TokenStream {
    let method = &block.method;
    match &block.owner {
        Owner::Free => quote!(#method),
        Owner::Inherent(_) => quote!(Self::#method),
        Owner::Trait(_, path) => trait_method(path, method),
    }
}

fn trait_method(path: &Path, method: &Ident) -> TokenStream {
    quote!(<Self as #path>::#method)
}

/// Type and const parameters; lifetimes are inferred.
fn turbofish(generics: &Generics) -> Option<TokenStream> {
    let names: Vec<_> = generics
        .params
        .iter()
        .filter_map(|param| match param {
            GenericParam::Type(param) => Some(&param.ident),
            GenericParam::Const(param) => Some(&param.ident),
            GenericParam::Lifetime(_) => None,
        })
        .collect();
    (!names.is_empty()).then(|| quote!(::<#(#names),*>))
}

/// `function(&ident)` at the parameter's type: a missing trait is reported there, and once, since rustc drops the
/// repetition of an error in the same place.
fn spanned_call(function: &TokenStream, ident: &Ident, ty: &Type) -> TokenStream {
    let (first, last) = ends(ty);
    let argument = at(ident.to_token_stream(), last);
    let reference = quote_spanned!(first=> &);
    quote_spanned!(first=> #function(#reference #argument))
}

/// The path as if the user had written it in place of the type. Where the type of a function is a projection, rustc
/// reports the function's path and its argument, as one error only if both are in one place.
fn written_at(path: TokenStream, ty: &Type) -> TokenStream {
    let (first, last) = ends(ty);
    let mut path: Vec<TokenTree> = path.into_iter().collect();
    for token in &mut path {
        // All but `$crate`, which means what it does where it was written.
        let written = if token.to_string() == "$crate" { token.span() } else { first };
        token.set_span(written.located_at(first));
    }
    if let Some(token) = path.last_mut() {
        token.set_span(last);
    }
    path.into_iter().collect()
}

/// The spans of the first and the last token.
fn ends(ty: &Type) -> (Span, Span) {
    let mut spans = ty.to_token_stream().into_iter().map(|token| token.span());
    let first = spans.next().unwrap_or_else(Span::mixed_site);
    (first, spans.last().unwrap_or(first))
}

/// The same tokens with the same hygiene, reported at another place.
fn at(tokens: TokenStream, place: Span) -> TokenStream {
    let relocate = |mut token: TokenTree| {
        token.set_span(token.span().located_at(place));
        token
    };
    tokens.into_iter().map(relocate).collect()
}

/// `input_state` of `state`; raw names lose their mark.
fn input_local(ident: &Ident) -> Ident {
    local(&format!("input_{}", crate::model::unraw(ident)))
}

/// `form_state` of `state`.
fn form_local(ident: &Ident) -> Ident {
    local(&format!("form_{}", crate::model::unraw(ident)))
}

fn local(name: &str) -> Ident {
    Ident::new(&format!("__replay_{name}"), Span::mixed_site())
}
