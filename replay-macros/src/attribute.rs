//! The attribute as a function from tokens to tokens: parse, validate, expand.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::quote;
use syn::Attribute;
use syn::parse::{ParseStream, Parser};

use crate::args::{self, Scope};
use crate::diagnostics::Diagnostics;
use crate::signature::Method;
use crate::validate::{self, Place};
use crate::{expand, fallback, impl_block};

/// The item without its marks, then what the attribute adds to it, then the errors.
pub(crate) fn replay_block(options: TokenStream, item: TokenStream) -> TokenStream {
    let mut diagnostics = Diagnostics::default();
    let expanded = match kind(&item) {
        Kind::Function => function(options, item, &mut diagnostics),
        Kind::Impl => impl_block::expand(options, item, &mut diagnostics),
        Kind::Other => {
            diagnostics.error(
                first_line(&item),
                "`#[replay_block]` goes on a function, a method or an impl block; move it there",
            );
            item
        }
    };
    let errors = diagnostics.into_tokens();
    quote!(#expanded #errors)
}

enum Kind {
    Function,
    Impl,
    Other,
}

/// Decided by the first tokens, so that a body in the making cannot hide what the item is.
fn kind(item: &TokenStream) -> Kind {
    let parser = |input: ParseStream<'_>| {
        Attribute::parse_outer(input)?;
        input.parse::<syn::Visibility>()?;
        let mut kind = Kind::Other;
        while let Ok(token) = input.parse::<TokenTree>() {
            match token.to_string().as_str() {
                "fn" => kind = Kind::Function,
                "impl" => kind = Kind::Impl,
                "const" | "async" | "unsafe" | "extern" | "default" => continue,
                text if text.starts_with('"') => continue,
                _ => {}
            }
            break;
        }
        input.parse::<TokenStream>()?;
        Ok(kind)
    };
    parser.parse2(item.clone()).unwrap_or(Kind::Other)
}

/// The item between its attributes and its braces, for the error to point at.
fn first_line(item: &TokenStream) -> TokenStream {
    let outside =
        |token: &TokenTree| !matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
    let after_attributes = |input: ParseStream<'_>| {
        Attribute::parse_outer(input)?;
        input.parse::<TokenStream>()
    };
    let item = after_attributes.parse2(item.clone()).unwrap_or_else(|_| item.clone());
    item.into_iter().take_while(outside).collect()
}

/// ```text
/// Input:   fn step(&self, state: &Tensor) -> Tensor { .. }
/// Output:  fn step(&self, state: &Tensor) -> Tensor { .. }  fn step_replay(..) -> .. { .. }
/// ```
fn function(options: TokenStream, item: TokenStream, diagnostics: &mut Diagnostics) -> TokenStream {
    let method: Method = match syn::parse2(item.clone()) {
        Ok(method) => method,
        Err(error) => {
            diagnostics.push(error);
            return item;
        }
    };
    let args = args::parse(options, Scope::Method, diagnostics);
    for second in method.marks() {
        diagnostics.error(second, "`#[replay_block]` is given twice; keep one of them");
    }
    let block = validate::block(&method, &args, &Place::Lone, diagnostics).filter(|_| diagnostics.len() == 0);
    let sibling = match block {
        Some(block) => Some(expand::sibling(&block)),
        None => fallback::sibling(&method, &args, &method.vis),
    };
    quote!(#method #sibling)
}
