//! What is read of a function: attributes, visibility and signature. The body stays raw tokens, so that half-typed
//! code passes through as it is.

use proc_macro2::{Group, TokenStream};
use quote::{ToTokens, TokenStreamExt};
use syn::parse::{Parse, ParseStream};
use syn::{Attribute, FnArg, Meta, Signature, Token, Visibility};

/// A function with its marks still on.
pub(crate) struct Method {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) defaultness: Option<Token![default]>,
    pub(crate) sig: Signature,
    pub(crate) body: Body,
}

pub(crate) enum Body {
    Braces(Group),
    Missing(Token![;]),
}

impl Method {
    /// The marks `#[replay_block]` on it, in order.
    pub(crate) fn marks(&self) -> impl Iterator<Item = &Attribute> {
        self.attrs.iter().filter(|attr| is_block_mark(attr))
    }
}

impl Parse for Method {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = Attribute::parse_outer(input)?;
        let vis = input.parse()?;
        let defaultness = input.peek(Token![default]).then(|| input.parse()).transpose()?;
        let sig = input.parse()?;
        let body = if input.peek(Token![;]) { Body::Missing(input.parse()?) } else { Body::Braces(input.parse()?) };
        Ok(Self { attrs, vis, defaultness, sig, body })
    }
}

/// The function as the user wrote it, but for the marks.
impl ToTokens for Method {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        let kept = self.attrs.iter().filter(|attr| !is_block_mark(attr));
        tokens.append_all(kept);
        self.vis.to_tokens(tokens);
        self.defaultness.to_tokens(tokens);
        let mut sig = self.sig.clone();
        for input in &mut sig.inputs {
            // A `cfg_attr` here is an error already; left in place, the mark in it would be another.
            attributes_mut(input).retain(|attr| !is_meta_mark(attr) && !attr.path().is_ident("cfg_attr"));
        }
        sig.to_tokens(tokens);
        match &self.body {
            Body::Braces(group) => group.to_tokens(tokens),
            Body::Missing(semi) => semi.to_tokens(tokens),
        }
    }
}

fn attributes_mut(input: &mut FnArg) -> &mut Vec<Attribute> {
    match input {
        FnArg::Receiver(receiver) => &mut receiver.attrs,
        FnArg::Typed(typed) => &mut typed.attrs,
    }
}

/// By its last segment: `#[replay_runtime::replay_block]` is the same attribute.
pub(crate) fn is_block_mark(attr: &Attribute) -> bool {
    attr.path().segments.last().is_some_and(|segment| segment.ident == "replay_block")
}

pub(crate) fn is_meta_mark(attr: &Attribute) -> bool {
    attr.path().is_ident("meta")
}

/// The options of a mark, or `None` where it is written `#[replay_block = ..]`.
pub(crate) fn mark_options(attr: &Attribute) -> Option<TokenStream> {
    match &attr.meta {
        Meta::Path(_) => Some(TokenStream::new()),
        Meta::List(list) => Some(list.tokens.clone()),
        Meta::NameValue(_) => None,
    }
}

/// The `#[cfg]` attributes, which go with everything that is made of what they stand on.
pub(crate) fn cfgs(attrs: &[Attribute]) -> Vec<Attribute> {
    attrs.iter().filter(|attr| attr.path().is_ident("cfg")).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn method(text: &str) -> Method {
        syn::parse_str(text).unwrap()
    }

    #[test]
    fn the_body_is_not_parsed() {
        let method = method("fn step(&self, x: &Tensor) -> Tensor { let = x. }");
        assert!(method.to_token_stream().to_string().contains("let = x ."));
    }

    #[test]
    fn marks_are_stripped_and_other_attributes_kept() {
        let method = method("#[inline] #[replay_runtime::replay_block] fn f(&self, #[meta] #[cfg(all())] n: i64) {}");
        assert_eq!(method.marks().count(), 1);
        let text = method.to_token_stream().to_string();
        assert!(text.contains("inline") && text.contains("cfg"), "{text}");
        assert!(!text.contains("replay_block") && !text.contains("meta"), "{text}");
    }

    #[test]
    fn a_missing_body_is_read() {
        assert!(matches!(method("fn f(&self);").body, Body::Missing(_)));
    }

    #[test]
    fn options_of_a_mark() {
        let method = method("#[replay_block] #[replay_block(name = \"a\")] #[replay_block = 3] fn f() {}");
        let options: Vec<_> = method.marks().map(|mark| mark_options(mark).map(|tokens| tokens.to_string())).collect();
        assert_eq!(options, [Some(String::new()), Some("name = \"a\"".to_owned()), None]);
    }
}
