//! What must hold of every expansion.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Expands, and panics where a promise is broken.
pub(crate) fn check(options: TokenStream, item: TokenStream) {
    let expanded = crate::attribute::replay_block(options.clone(), item.clone());
    let report = || format!("#[replay_block({options})]\n{item}\nbecomes\n{expanded}");
    let parsed = syn::parse2::<syn::Item>(item.clone()).is_ok_and(|item| !matches!(item, syn::Item::Verbatim(_)));
    let (before, after) = (flat(item.clone()), flat(expanded.clone()));
    let methods_between = before.contains(&Flat::Token("impl".to_owned())) && contains(&after, &before);
    // Where syn writes generics, lifetimes stand before types, and nothing stands for an empty `<>` or `where`.
    let body = item.clone().into_iter().last().into_iter().collect();
    let in_another_order = || counted(&before, &after) && contains(&after, &flat(body));
    let kept = begins(&after, &before) || methods_between || in_another_order();
    assert!(kept, "the item is not what it was:\n{}", report());
    if parsed {
        if let Err(error) = syn::parse2::<syn::File>(expanded.clone()) {
            panic!("no items: {error}\n{}", report());
        }
    }
}

/// A token without its insides, or the end of a group.
#[derive(PartialEq)]
enum Flat {
    Open(Delimiter),
    Close(Delimiter),
    Token(String),
}

/// Without each `where` that nothing stands behind: syn does not write it.
fn flat(tokens: TokenStream) -> Vec<Flat> {
    let mut list = Vec::new();
    push(tokens, &mut list);
    let ends = |token: Option<&Flat>| {
        token.is_some_and(|token| *token == Flat::Open(Delimiter::Brace) || *token == Flat::Token(";".to_owned()))
    };
    let empty = |i: usize| list[i] == Flat::Token("where".to_owned()) && ends(list.get(i + 1));
    let kept: Vec<bool> = (0..list.len()).map(|i| !empty(i)).collect();
    let mut kept = kept.into_iter();
    list.retain(|_| kept.next() == Some(true));
    list
}

fn push(tokens: TokenStream, list: &mut Vec<Flat>) {
    for token in tokens {
        match token {
            // Invisible ones are how a macro's fragments stay whole; they may go where nothing depends on them.
            TokenTree::Group(group) if group.delimiter() == Delimiter::None => push(group.stream(), list),
            TokenTree::Group(group) => {
                list.push(Flat::Open(group.delimiter()));
                push(group.stream(), list);
                list.push(Flat::Close(group.delimiter()));
            }
            token => list.push(Flat::Token(token.to_string())),
        }
    }
}

/// Whether `expanded` has each token of `item` as often, less its marks and what separates.
fn counted(item: &[Flat], expanded: &[Flat]) -> bool {
    let mut left: Vec<_> = expanded.iter().collect();
    let mut i = 0;
    while i < item.len() {
        let len = mark_len(&item[i..]);
        let separates = matches!(&item[i], Flat::Token(text) if ["<", ">", ",", "where"].contains(&text.as_str()));
        if len == 0 && !separates {
            let Some(found) = left.iter().position(|token| **token == item[i]) else { return false };
            left.swap_remove(found);
        }
        i += len.max(1);
    }
    true
}

/// Whether `expanded` has the tokens of `item` in their order, less its marks.
fn contains(expanded: &[Flat], item: &[Flat]) -> bool {
    let mut left = expanded.iter();
    let mut i = 0;
    while i < item.len() {
        match mark_len(&item[i..]) {
            0 if left.any(|token| *token == item[i]) => i += 1,
            0 => return false,
            len => i += len,
        }
    }
    true
}

/// Whether `expanded` begins with `item`, less its marks.
fn begins(expanded: &[Flat], item: &[Flat]) -> bool {
    let (mut i, mut j) = (0, 0);
    while i < item.len() {
        if expanded.get(j) == Some(&item[i]) && !(mark_len(&item[i..]) > 0 && mark_len(&expanded[j..]) == 0) {
            (i, j) = (i + 1, j + 1);
            continue;
        }
        match mark_len(&item[i..]) {
            0 => return false,
            len => i += len,
        }
    }
    true
}

/// The length of an attribute that is a mark, or may become one, at the start; 0 where there is none.
fn mark_len(tokens: &[Flat]) -> usize {
    let [Flat::Token(hash), Flat::Open(Delimiter::Bracket), rest @ ..] = tokens else { return 0 };
    let (mut depth, mut mark) = (1, false);
    for (len, token) in rest.iter().enumerate() {
        match token {
            Flat::Open(_) => depth += 1,
            Flat::Close(_) => depth -= 1,
            Flat::Token(text) => mark |= ["meta", "replay_block", "cfg_attr"].contains(&text.as_str()),
        }
        if depth == 0 {
            return if hash == "#" && mark { len + 3 } else { 0 };
        }
    }
    0
}
