//! The documentation of a sibling: what it runs, what it keeps, when it fails.

use proc_macro2::{Spacing, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::Type;

use crate::model::{Block, Owner, Parameter, unraw};

pub(crate) fn of(block: &Block) -> TokenStream {
    let method = &block.method;
    let link = match block.owner {
        Owner::Free => format!("[`{method}`]"),
        Owner::Inherent(_) => format!("[`{method}`](Self::{method})"),
        // The trait may be less visible than this method: no link.
        Owner::Trait(..) => format!("`{method}`"),
    };
    let rollout = block.parameters.iter().find(|it| matches!(it.role, crate::model::Role::Rollout));
    let rollout = rollout.map_or(&block.rollout, |parameter| &parameter.ident);
    let mut lines = vec![
        format!(
            "{link} run as a replay block of `{rollout}`: the forward pass keeps the inputs only, the backward pass"
        ),
        "runs the block again.".to_owned(),
        String::new(),
        format!("Inputs: {}.", names(block.inputs())),
    ];
    if block.metas().next().is_some() {
        paragraph(&mut lines, format!("Data, kept as a copy: {}.", names(block.metas())));
    }
    if let Some(context) = &block.context {
        paragraph(&mut lines, format!("Forward and replay run inside the context that `{}` makes.", text(context)));
    }
    if block.buffers {
        paragraph(
            &mut lines,
            "The block may update non-trainable variables: the forward does, its replay does not again.".to_owned(),
        );
    }
    if block.early_stop {
        paragraph(&mut lines, "The replay may end, by unwinding, before the body does.".to_owned());
    }
    if block.nested() {
        paragraph(&mut lines, "The block runs other blocks; they run again inside its replay.".to_owned());
    }
    lines.extend(
        ["", "# Errors", "", "Where the block cannot be recorded, or returns an error itself."].map(str::to_owned),
    );
    let lines = lines.iter().map(|line| if line.is_empty() { String::new() } else { format!(" {line}") });
    quote!(#(#[doc = #lines])*)
}

fn paragraph(lines: &mut Vec<String>, text: String) {
    lines.extend([String::new(), text]);
}

fn names<'a>(parameters: impl Iterator<Item = &'a Parameter>) -> String {
    let names: Vec<_> = parameters.map(|parameter| format!("`{}`", unraw(&parameter.ident))).collect();
    names.join(", ")
}

/// A type in one line, spaced as people write it.
pub(crate) fn type_text(ty: &Type) -> String {
    text(ty)
}

fn text(tokens: impl ToTokens) -> String {
    let mut text = String::new();
    write(tokens.into_token_stream(), &mut text);
    text
}

fn write(tokens: TokenStream, text: &mut String) {
    let mut word_before = false;
    for token in tokens {
        let word = matches!(token, TokenTree::Ident(_) | TokenTree::Literal(_));
        if word && word_before {
            text.push(' ');
        }
        word_before = word;
        match token {
            TokenTree::Group(group) => {
                let (open, close) = delimiters(&group);
                text.push_str(open);
                write(group.stream(), text);
                text.push_str(close);
            }
            TokenTree::Punct(punct) => {
                let joint = punct.spacing() == Spacing::Joint;
                match punct.as_char() {
                    '+' | '=' if !joint => text.extend([' ', punct.as_char(), ' ']),
                    ',' | ';' => text.extend([punct.as_char(), ' ']),
                    other => text.push(other),
                }
            }
            other => text.push_str(&other.to_string()),
        }
    }
}

fn delimiters(group: &proc_macro2::Group) -> (&'static str, &'static str) {
    match group.delimiter() {
        proc_macro2::Delimiter::Parenthesis => ("(", ")"),
        proc_macro2::Delimiter::Bracket => ("[", "]"),
        proc_macro2::Delimiter::Brace => ("{ ", " }"),
        proc_macro2::Delimiter::None => ("", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_read_as_written() {
        for text in ["Tensor", "(Tensor, Tensor)", "Result<(Tensor, Tensor), Box<dyn Error + Send>>", "tch::Tensor"] {
            assert_eq!(type_text(&syn::parse_str(text).unwrap()), text);
        }
    }
}
