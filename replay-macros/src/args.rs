//! `#[replay_block(..)]`: the grammar of the options, with the span of each key.

use proc_macro2::TokenStream;
use syn::ext::IdentExt;
use syn::parse::{ParseStream, Parser};
use syn::{Ident, LitStr, Path, PathArguments, Token};

use crate::diagnostics::Diagnostics;

/// Where the attribute stands: an impl block has fewer options than a method.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    Method,
    Impl,
}

/// The options as written; `None` where absent or wrong.
#[derive(Default)]
pub(crate) struct BlockArgs {
    pub(crate) name: Option<LitStr>,
    pub(crate) context: Option<Path>,
    pub(crate) krate: Option<Path>,
    pub(crate) buffers: bool,
    pub(crate) early_stop: bool,
}

const METHOD_OPTIONS: &str =
    "the options are `name = \"..\"`, `context = path`, `buffers`, `early_stop` and `crate = ::path`";
const IMPL_OPTIONS: &str = "the only option of an impl block is `crate = ::path`; the others belong on its methods";

const CONTEXT: &str = "context = Self::cache_scope";
const CRATE: &str = "crate = ::my_facade::replay_runtime";

/// Parses the options; a wrong one is reported and skipped, so that the rest are still checked.
pub(crate) fn parse(tokens: TokenStream, scope: Scope, diagnostics: &mut Diagnostics) -> BlockArgs {
    let mut args = BlockArgs::default();
    let parser = |input: ParseStream<'_>| {
        while !input.is_empty() {
            if let Err(error) = parse_option(input, scope, &mut args) {
                diagnostics.push(error);
                skip_option(input)?;
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(())
    };
    if let Err(error) = parser.parse2(tokens) {
        diagnostics.push(error);
    }
    args
}

fn parse_option(input: ParseStream<'_>, scope: Scope, args: &mut BlockArgs) -> syn::Result<()> {
    let valid = if scope == Scope::Method { METHOD_OPTIONS } else { IMPL_OPTIONS };
    if !input.peek(Ident::peek_any) {
        return Err(input.error(format!("expected an option; {valid}")));
    }
    let key = input.call(Ident::parse_any)?;
    match key.to_string().as_str() {
        "name" if scope == Scope::Method => set(input, &key, "name = \"step_again\"", &mut args.name),
        "context" if scope == Scope::Method => {
            set(input, &key, CONTEXT, &mut args.context)?;
            // In an expression, `path<T>` is a comparison.
            check_segments(&key, CONTEXT, &mut args.context, |arguments| match arguments {
                PathArguments::AngleBracketed(generics) => generics.colon2_token.is_some(),
                arguments => arguments.is_none(),
            })
        }
        "buffers" if scope == Scope::Method => set_flag(input, &key, &mut args.buffers),
        "early_stop" if scope == Scope::Method => set_flag(input, &key, &mut args.early_stop),
        "crate" => {
            set(input, &key, CRATE, &mut args.krate)?;
            check_segments(&key, CRATE, &mut args.krate, PathArguments::is_none)?;
            check_crate_path(&mut args.krate)
        }
        other => Err(syn::Error::new(key.span(), format!("`replay_block` has no option `{other}` here; {valid}"))),
    }
}

/// `= value`, once.
fn set<T: syn::parse::Parse>(
    input: ParseStream<'_>,
    key: &Ident,
    example: &str,
    slot: &mut Option<T>,
) -> syn::Result<()> {
    input.parse::<Token![=]>().map_err(|_| malformed(key, example))?;
    let value = input.parse::<T>().map_err(|_| malformed(key, example))?;
    if !input.is_empty() && !input.peek(Token![,]) {
        return Err(malformed(key, example));
    }
    if slot.is_some() {
        return Err(given_twice(key));
    }
    *slot = Some(value);
    Ok(())
}

/// The bare key, once. One way to write it: with `= false` beside `= true`, either could be left from an edit.
fn set_flag(input: ParseStream<'_>, key: &Ident, slot: &mut bool) -> syn::Result<()> {
    if !input.is_empty() && !input.peek(Token![,]) {
        let message = format!("option `{key}` takes no value; write `{key}` alone, or leave it out");
        return Err(syn::Error::new(key.span(), message));
    }
    if std::mem::replace(slot, true) {
        return Err(given_twice(key));
    }
    Ok(())
}

fn given_twice(key: &Ident) -> syn::Error {
    syn::Error::new(key.span(), format!("option `{key}` is given twice; keep one of them"))
}

/// A path may be written as one of a type, with arguments that generated code could not use where it stands.
fn check_segments(
    key: &Ident,
    example: &str,
    slot: &mut Option<Path>,
    allowed: impl Fn(&PathArguments) -> bool,
) -> syn::Result<()> {
    let wrong = |path: &mut Path| !path.segments.iter().all(|segment| allowed(&segment.arguments));
    match slot.take_if(wrong) {
        None => Ok(()),
        Some(_) => Err(malformed(key, example)),
    }
}

fn malformed(key: &Ident, example: &str) -> syn::Error {
    syn::Error::new(key.span(), format!("malformed option `{key}`; write `{example}`"))
}

/// A relative path would name another thing in each module that uses the attribute.
fn check_crate_path(slot: &mut Option<Path>) -> syn::Result<()> {
    let absolute = |path: &Path| {
        let first = path.segments.first().map(|segment| segment.ident.to_string());
        path.leading_colon.is_some() || matches!(first.as_deref(), Some("crate" | "$crate"))
    };
    match slot.take_if(|path| !absolute(path)) {
        None => Ok(()),
        Some(path) => Err(syn::Error::new_spanned(
            path,
            "the path of option `crate` must be absolute; start it with `::` or `crate::`",
        )),
    }
}

fn skip_option(input: ParseStream<'_>) -> syn::Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(tokens: &str, scope: Scope) -> Vec<String> {
        let mut diagnostics = Diagnostics::default();
        parse(tokens.parse().unwrap(), scope, &mut diagnostics);
        diagnostics.messages()
    }

    #[test]
    fn every_option_is_read() {
        let mut diagnostics = Diagnostics::default();
        let tokens = "name = \"again\", context = Self::scope::<A, B>, buffers, early_stop, crate = ::facade,";
        let args = parse(tokens.parse().unwrap(), Scope::Method, &mut diagnostics);
        assert_eq!(diagnostics.messages(), Vec::<String>::new());
        assert_eq!(args.name.unwrap().value(), "again");
        assert!(args.context.is_some() && args.krate.is_some() && args.buffers && args.early_stop);
    }

    #[test]
    fn nothing_is_an_empty_list() {
        assert!(messages("", Scope::Method).is_empty());
        assert!(messages("", Scope::Impl).is_empty());
    }

    #[test]
    fn one_mistake_does_not_hide_the_next() {
        let found = messages("nam = 1, name = 3, context, crate = facade", Scope::Method);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].contains("no option `nam`"));
        assert!(found[1].contains("malformed option `name`"));
        assert!(found[2].contains("malformed option `context`"));
        assert!(found[3].contains("must be absolute"));
    }

    #[test]
    fn paths_are_those_of_expressions() {
        for wrong in
            ["context = Self::scope<T>", "context = scope(A) -> B", "crate = ::facade<T>", "crate = ::facade::<T>"]
        {
            let found = messages(wrong, Scope::Method);
            assert!(found.len() == 1 && found[0].contains("malformed option"), "{wrong}: {found:?}");
        }
    }

    #[test]
    fn a_repeated_option_is_an_error() {
        let found = messages("name = \"a\", name = \"b\"", Scope::Method);
        assert!(found[0].contains("twice"), "{found:?}");
    }

    #[test]
    fn a_flag_is_its_key_alone_and_off_without_it() {
        let flags = |tokens: &str| {
            let args = parse(tokens.parse().unwrap(), Scope::Method, &mut Diagnostics::default());
            (args.buffers, args.early_stop)
        };
        assert_eq!((flags(""), flags("buffers"), flags("early_stop")), ((false, false), (true, false), (false, true)));
        for wrong in ["buffers = true", "buffers = false", "buffers(all)", "buffers buffers"] {
            let found = messages(wrong, Scope::Method);
            assert!(found.len() == 1 && found[0].contains("takes no value"), "{wrong}: {found:?}");
        }
        assert!(messages("buffers, buffers", Scope::Method)[0].contains("twice"));
    }

    #[test]
    fn a_value_ends_at_its_comma() {
        let found = messages("name = \"a\" \"b\"", Scope::Method);
        assert!(found[0].contains("malformed"), "{found:?}");
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn an_impl_block_takes_only_the_crate() {
        assert!(messages("crate = crate::facade", Scope::Impl).is_empty());
        for option in ["name = \"a\"", "buffers", "early_stop"] {
            let found = messages(option, Scope::Impl);
            assert!(found.len() == 1 && found[0].contains("belong on its methods"), "{found:?}");
        }
    }

    #[test]
    fn something_else_lists_the_options() {
        let found = messages("\"again\"", Scope::Method);
        assert!(found[0].contains("the options are"), "{found:?}");
    }
}
