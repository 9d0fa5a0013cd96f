//! Whole expansions against stored ones, in `tests/expand`: each file holds an item and what becomes of it.
//!
//! `REPLAY_BLESS=1 cargo test` writes the stored ones anew; read the difference before keeping it.

use std::path::{Path, PathBuf};
use std::{env, fs};

use proc_macro2::{Group, TokenStream, TokenTree};
use quote::ToTokens;

use crate::attribute::replay_block;
use crate::signature::{is_block_mark, mark_options};

const DIVIDER: &str = "\n// becomes\n\n";

/// The fuzz target has a workspace of its own and includes these files one by one; nothing else compiles it.
#[test]
fn the_fuzz_target_includes_every_stage() {
    let modules = |text: &'static str| -> Vec<_> {
        let names = text.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
        names.filter(|name| !["check", "golden", "mutate", "seeds"].contains(name)).collect()
    };
    assert_eq!(modules(include_str!("../../fuzz/src/expand.rs")), modules(include_str!("lib.rs")));
}

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/expand");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn input_of(text: &str) -> &str {
    text.split(DIVIDER).next().unwrap().trim_end()
}

/// The options of the first mark, and the item without it: what the compiler hands to the attribute.
fn arguments(input: &str) -> (TokenStream, TokenStream) {
    let mut item: syn::Item = syn::parse_str(input).unwrap();
    let attrs = match &mut item {
        syn::Item::Fn(item) => &mut item.attrs,
        syn::Item::Impl(item) => &mut item.attrs,
        syn::Item::Struct(item) => &mut item.attrs,
        _ => panic!("another kind of item"),
    };
    let mark = attrs.iter().position(is_block_mark).unwrap();
    let options = mark_options(&attrs.remove(mark)).unwrap();
    (options, item.into_token_stream())
}

fn expansion(input: &str) -> String {
    let (options, item) = arguments(input);
    let expanded = replay_block(options, item);
    let text = expanded.to_string();
    let file = syn::parse2(expanded).unwrap_or_else(|error| panic!("{error}:\n{text}"));
    prettyplease::unparse(&file)
}

#[test]
fn expansions_are_the_stored_ones() {
    let bless = env::var_os("REPLAY_BLESS").is_some();
    let mut wrong = Vec::new();
    for path in files() {
        let text = fs::read_to_string(&path).unwrap();
        let input = input_of(&text);
        let found = format!("{input}\n{DIVIDER}{}", expansion(input));
        if bless {
            fs::write(&path, found).unwrap();
        } else if found != text {
            wrong.push(format!("{}, now:\n{found}", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn another_crate_path_leaves_no_trace_of_the_default() {
    for path in files() {
        let text = fs::read_to_string(&path).unwrap();
        let (options, item) = arguments(input_of(&text));
        if options.to_string().contains("crate") {
            continue;
        }
        let options = if options.is_empty() {
            quote::quote!(crate = ::facade)
        } else {
            quote::quote!(#options, crate = ::facade)
        };
        let expanded = replay_block(options, item).to_string();
        assert!(!expanded.contains("replay_runtime"), "{}: {expanded}", path.display());
    }
}

/// They are not made braces, which would hide what the compiler has to say.
#[test]
fn other_brackets_than_braces_are_an_error() {
    let method = quote::quote!(
        fn forward(&self, xs: &Tensor) -> Tensor {
            xs + 1.0
        }
    );
    for item in [quote::quote!(impl Module for Net (#method)), quote::quote!(impl Module for Net [#method])] {
        let expanded = replay_block(TokenStream::new(), item.clone()).to_string();
        assert!(expanded.starts_with(&item.to_string()) && expanded.contains("compile_error"), "{expanded}");
    }
}

/// Half-typed code reaches the attribute as it is: whatever token is missing, the answer is tokens and no panic.
#[test]
fn no_missing_token_is_a_panic() {
    for path in files() {
        let text = fs::read_to_string(&path).unwrap();
        let (options, item) = arguments(input_of(&text));
        let count = flat_len(&item);
        for missing in 0..count {
            let mut left = missing;
            let damaged = without(item.clone(), &mut left);
            replay_block(options.clone(), damaged);
        }
        for missing in 0..flat_len(&options) {
            let mut left = missing;
            replay_block(without(options.clone(), &mut left), item.clone());
        }
    }
}

fn flat_len(tokens: &TokenStream) -> usize {
    let len = |token: TokenTree| match token {
        TokenTree::Group(group) => 1 + flat_len(&group.stream()),
        _ => 1,
    };
    tokens.clone().into_iter().map(len).sum()
}

/// The tokens without the one that `left` counts down to.
fn without(tokens: TokenStream, left: &mut usize) -> TokenStream {
    let mut kept = Vec::new();
    for token in tokens {
        let skipped = *left == 0;
        *left = left.wrapping_sub(1);
        if skipped {
            continue;
        }
        kept.push(match token {
            TokenTree::Group(group) => TokenTree::Group(Group::new(group.delimiter(), without(group.stream(), left))),
            token => token,
        });
    }
    kept.into_iter().collect()
}
