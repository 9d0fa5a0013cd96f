//! Which attributes of a method go with its sibling: those that say something of the signature, and not of the body.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Attribute, Meta, parse_quote};

use crate::types;

/// ```text
/// Input:   #[inline] #[cfg(unix)] #[expect(non_snake_case)] #[cfg_attr(test, cold, doc(hidden))]
/// Output:  #[cfg(unix)] #[allow(non_snake_case)] #[cfg_attr(test, doc(hidden))]
/// ```
pub(crate) fn by_sibling(conditions: &[Attribute], attrs: &[Attribute]) -> Vec<Attribute> {
    [conditions.to_vec(), select(attrs, &of_signature)].concat()
}

/// The attributes of a trait impl that the inherent impl beside it has too.
pub(crate) fn by_twin(attrs: &[Attribute]) -> Vec<Attribute> {
    select(attrs, &of_signature)
}

/// The attributes of a parameter that go with everything that is made of it.
pub(crate) fn by_argument(attrs: &[Attribute]) -> Vec<Attribute> {
    select(attrs, &|meta| meta.path().is_ident("cfg").then(|| meta.to_token_stream()))
}

fn of_signature(meta: &Meta) -> Option<TokenStream> {
    let name = meta.path().get_ident()?.to_string();
    match (name.as_str(), meta) {
        ("cfg" | "deprecated" | "target_feature" | "allow", _) => Some(meta.to_token_stream()),
        ("doc", Meta::List(list)) => types::mentions(&list.tokens, "hidden").then(|| meta.to_token_stream()),
        // What is expected of the method would be missing here. A sibling that may be dead keeps the method alive, so
        // that such an expectation would never be met: the sibling is said to be dead instead.
        ("expect", Meta::List(list)) => {
            let lints = &list.tokens;
            let dead = types::mentions(lints, "dead_code") || types::mentions(lints, "unused");
            (!dead).then(|| quote!(allow(#lints)))
        }
        _ => None,
    }
}

type Choice = dyn Fn(&Meta) -> Option<TokenStream>;

fn select(attrs: &[Attribute], choice: &Choice) -> Vec<Attribute> {
    attrs.iter().filter_map(|attr| chosen(&attr.meta, choice)).map(|meta| parse_quote!(#[#meta])).collect()
}

/// What `choice` makes of an attribute, or of those inside a `cfg_attr`.
fn chosen(meta: &Meta, choice: &Choice) -> Option<TokenStream> {
    let Some((condition, attrs)) = conditional(meta) else { return choice(meta) };
    let attrs: Vec<_> = attrs.iter().filter_map(|meta| chosen(meta, choice)).collect();
    (!attrs.is_empty()).then(|| quote!(cfg_attr(#condition, #(#attrs),*)))
}

/// The attribute called `name` that a `cfg_attr` holds, with its condition.
pub(crate) fn under_condition(attr: &Attribute, name: &str) -> Option<(TokenStream, Meta)> {
    let (condition, attrs) = conditional(&attr.meta)?;
    attrs.into_iter().find(|meta| is_called(meta, name)).map(|meta| (condition, meta))
}

/// The attribute as it was, but for those called `name` in a `cfg_attr`; `None` where nothing is left of it.
pub(crate) fn without(attr: &Attribute, name: &str) -> Option<Attribute> {
    if under_condition(attr, name).is_none() {
        return Some(attr.clone());
    }
    let (condition, mut attrs) = conditional(&attr.meta)?;
    attrs.retain(|meta| !is_called(meta, name));
    (!attrs.is_empty()).then(|| parse_quote!(#[cfg_attr(#condition, #(#attrs),*)]))
}

/// By its last segment: a path may lead to it.
fn is_called(meta: &Meta, name: &str) -> bool {
    meta.path().segments.last().is_some_and(|segment| segment.ident == name)
}

/// The condition of a `cfg_attr`, and the attributes under it that can be read.
fn conditional(meta: &Meta) -> Option<(TokenStream, Vec<Meta>)> {
    let list = meta.require_list().ok().filter(|list| list.path.is_ident("cfg_attr"))?;
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',');
    let tokens: Vec<TokenTree> = list.tokens.clone().into_iter().collect();
    let mut parts = tokens.split(is_comma).map(|part| part.iter().cloned().collect::<TokenStream>());
    let condition = parts.next()?;
    Some((condition, parts.filter_map(|part| syn::parse2(part).ok()).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carried_of(text: &str) -> String {
        let item: syn::ItemFn = syn::parse_str(&format!("{text}\nfn f() {{}}")).unwrap();
        let kept = by_twin(&item.attrs);
        kept.iter().map(|attr| attr.to_token_stream().to_string().replace(' ', "")).collect()
    }

    #[test]
    fn what_speaks_of_the_signature_goes_with_it() {
        for text in [
            "#[cfg(unix)]",
            "#[deprecated]",
            "#[deprecated=\"why\"]",
            "#[deprecated(note=\"why\")]",
            "#[target_feature(enable=\"avx\")]",
            "#[allow(non_snake_case,reason=\"why\")]",
            "#[doc(hidden)]",
            "#[cfg_attr(unix,cfg(test))]",
            "#[cfg_attr(any(unix,test),deprecated,doc(hidden))]",
            "#[cfg_attr(unix,cfg_attr(test,deprecated))]",
        ] {
            assert_eq!(carried_of(text), text);
        }
        assert_eq!(carried_of("#[expect(unused_mut)]"), "#[allow(unused_mut)]");
        assert_eq!(carried_of("#[cfg_attr(unix, inline, cfg(test), must_use)]"), "#[cfg_attr(unix,cfg(test))]");
    }

    #[test]
    fn what_speaks_of_the_body_or_is_there_once_stays() {
        for text in [
            "/// Text.",
            "#[doc(alias = \"x\")]",
            "#[inline]",
            "#[must_use]",
            "#[cold]",
            "#[track_caller]",
            "#[unsafe(no_mangle)]",
            "#[unsafe(export_name = \"step\")]",
            "#[tracing::instrument]",
            "#[test]",
            "#[deny(unused)]",
            "#[expect(dead_code)]",
            "#[expect(unused, reason = \"later\")]",
            "#[cfg_attr(unix, inline)]",
            "#[cfg_attr(unix, unsafe(no_mangle))]",
            "#[cfg_attr()]",
            "#[cfg_attr]",
            "#[my::cfg(unix)]",
        ] {
            assert_eq!(carried_of(text), "", "{text}");
        }
    }

    #[test]
    fn a_cfg_goes_with_its_parameter_from_inside_a_cfg_attr_too() {
        let attrs: Vec<Attribute> = vec![
            parse_quote!(#[cfg(a)]),
            parse_quote!(#[allow(unused)]),
            parse_quote!(#[cfg_attr(b, meta, cfg(c))]),
            parse_quote!(#[cfg_attr(d, meta)]),
        ];
        let expected: Vec<Attribute> = vec![parse_quote!(#[cfg(a)]), parse_quote!(#[cfg_attr(b, cfg(c))])];
        assert_eq!(text(&by_argument(&attrs)), text(&expected));
        let left: Vec<_> = attrs.iter().filter_map(|attr| without(attr, "meta")).collect();
        let expected: Vec<Attribute> = [expected, vec![parse_quote!(#[allow(unused)])]].concat();
        assert_eq!(text(&left), text(&[expected[0].clone(), expected[2].clone(), expected[1].clone()]));
    }

    fn text(attrs: &[Attribute]) -> String {
        quote!(#(#attrs)*).to_string()
    }
}
