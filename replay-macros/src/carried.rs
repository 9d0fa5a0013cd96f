//! Which attributes of a method go with its sibling: those that say something of the signature, and not of the body.

use proc_macro2::{TokenStream, TokenTree};
use quote::quote;
use syn::{Attribute, Meta, parse_quote};

use crate::types;

/// ```text
/// Input:   #[inline] #[cfg(unix)] #[expect(non_snake_case)] #[cfg_attr(test, cold, doc(hidden))]
/// Output:  #[cfg(unix)] #[allow(non_snake_case)] #[cfg_attr(test, doc(hidden))]
/// ```
pub(crate) fn by_sibling(attrs: &[Attribute]) -> Vec<Attribute> {
    attrs.iter().filter_map(|attr| carried(&attr.meta)).map(|meta| parse_quote!(#[#meta])).collect()
}

fn carried(meta: &Meta) -> Option<TokenStream> {
    let name = meta.path().get_ident()?.to_string();
    match (name.as_str(), meta) {
        ("cfg" | "deprecated" | "target_feature" | "allow", _) => Some(quote!(#meta)),
        ("doc", Meta::List(list)) => types::mentions(&list.tokens, "hidden").then(|| quote!(#meta)),
        // What is expected of the method alone would be missing here.
        ("expect", Meta::List(list)) => {
            let lints = &list.tokens;
            Some(quote!(allow(#lints)))
        }
        ("cfg_attr", Meta::List(list)) => {
            let (condition, attrs) = conditional(&list.tokens)?;
            let attrs: Vec<_> = attrs.iter().filter_map(carried).collect();
            (!attrs.is_empty()).then(|| quote!(cfg_attr(#condition, #(#attrs),*)))
        }
        _ => None,
    }
}

/// The condition of a `cfg_attr`, and the attributes under it that can be read.
pub(crate) fn conditional(tokens: &TokenStream) -> Option<(TokenStream, Vec<Meta>)> {
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',');
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut parts = tokens.split(is_comma).map(|part| part.iter().cloned().collect::<TokenStream>());
    let condition = parts.next()?;
    Some((condition, parts.filter_map(|part| syn::parse2(part).ok()).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quote::ToTokens;

    fn carried_of(text: &str) -> String {
        let item: syn::ItemFn = syn::parse_str(&format!("{text}\nfn f() {{}}")).unwrap();
        let kept = by_sibling(&item.attrs);
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
        assert_eq!(carried_of("#[expect(unused)]"), "#[allow(unused)]");
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
            "#[cfg_attr(unix, inline)]",
            "#[cfg_attr(unix, unsafe(no_mangle))]",
            "#[cfg_attr()]",
            "#[my::cfg(unix)]",
        ] {
            assert_eq!(carried_of(text), "", "{text}");
        }
    }
}
