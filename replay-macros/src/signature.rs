//! What is read of a function: attributes, visibility and signature. The body stays raw tokens, so that half-typed
//! code passes through as it is.

use proc_macro2::{Group, TokenStream};
use quote::{ToTokens, TokenStreamExt};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Attribute, FnArg, Meta, Signature, Token, Visibility, parse_quote, parse_quote_spanned};

use crate::carried;

const MARK: &str = "replay_block";

/// A function with its marks still on.
pub(crate) struct Method {
    pub(crate) attrs: Vec<Attribute>,
    /// Under which `#[cfg]`s it is a block.
    pub(crate) conditions: Vec<Attribute>,
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

    /// ```text
    /// Input:   #[cfg_attr(feature = "replay", replay_block)]
    /// Output:  #[replay_block], and the condition #[cfg(feature = "replay")]
    /// ```
    ///
    /// For a mark inside an impl block; rustc resolves the one that stands alone.
    pub(crate) fn resolve_marks(&mut self) {
        let attrs = std::mem::take(&mut self.attrs);
        for attr in attrs {
            if let Some((condition, mark)) = carried::under_condition(&attr, MARK) {
                self.conditions.push(parse_quote!(#[cfg(#condition)]));
                self.attrs.push(parse_quote_spanned!(mark.span()=> #[#mark]));
            }
            self.attrs.extend(carried::without(&attr, MARK));
        }
    }
}

impl Parse for Method {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = Attribute::parse_outer(input)?;
        let vis = input.parse()?;
        let defaultness = input.peek(Token![default]).then(|| input.parse()).transpose()?;
        let sig = input.parse()?;
        let body = if input.peek(Token![;]) { Body::Missing(input.parse()?) } else { Body::Braces(input.parse()?) };
        Ok(Self { attrs, conditions: Vec::new(), vis, defaultness, sig, body })
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
            let attrs = attributes_mut(input);
            attrs.retain(|attr| !attr.path().is_ident("meta"));
            *attrs = attrs.iter().filter_map(|attr| carried::without(attr, "meta")).collect();
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
    attr.path().segments.last().is_some_and(|segment| segment.ident == MARK)
}

/// `meta`, also where it stands under a condition: where the block is made, its data is data.
pub(crate) fn meta_mark(attr: &Attribute) -> Option<Meta> {
    if attr.path().is_ident("meta") {
        return Some(attr.meta.clone());
    }
    carried::under_condition(attr, "meta").map(|(_, meta)| meta)
}

/// The options of a mark, or `None` where it is written `#[replay_block = ..]`.
pub(crate) fn mark_options(attr: &Attribute) -> Option<TokenStream> {
    match &attr.meta {
        Meta::Path(_) => Some(TokenStream::new()),
        Meta::List(list) => Some(list.tokens.clone()),
        Meta::NameValue(_) => None,
    }
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
