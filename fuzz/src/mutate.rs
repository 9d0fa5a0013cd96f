//! From bytes to tokens: text as it is, or a seed whose tokens are deleted, doubled, swapped and replaced as the bytes say.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use crate::seeds::Seed;

/// What stands for a token, or more than one.
const DICTIONARY: &[&str] = &[
    "self",
    "Self",
    "&",
    "&&",
    "mut",
    "Tensor",
    "&Tensor",
    "Option<&Tensor>",
    "Option<Tensor>",
    "tch::Tensor",
    "Vec<Tensor>",
    "(Tensor, Tensor)",
    "(Tensor,)",
    "()",
    "!",
    "_",
    "Result<Tensor, E>",
    "impl Trait",
    "dyn Trait",
    "[Tensor; 2]",
    "[Tensor]",
    "#[meta]",
    "#[meta(x)]",
    "#[replay_block]",
    "#[replay_block(buffers)]",
    "#[cfg(x)]",
    "#[cfg_attr(x, meta)]",
    "#[doc = \"x\"]",
    "#![inner]",
    "'m",
    "'static",
    "'_",
    "&'m self",
    "Rollout<'m>",
    "&Rollout<'m>",
    "rollout: &Rollout<'m>",
    "for<'a>",
    "where",
    "Self: 'm",
    "'a: 'b",
    "T: Clone",
    "<T>",
    "<'a>",
    "<const N: usize>",
    "const",
    "async",
    "unsafe",
    "extern \"C\"",
    "default",
    "pub",
    "pub(crate)",
    "fn",
    "impl",
    "trait",
    "struct",
    "macro_rules!",
    "mod",
    "->",
    "=>",
    "::",
    ":",
    ",",
    ";",
    "=",
    "..",
    "...",
    "|",
    "+",
    "?",
    "?Sized",
    "@",
    "$",
    "#",
    "r#fn",
    "r#type",
    "name",
    "name = \"again\"",
    "context = Self::snapshot",
    "crate = ::facade",
    "buffers",
    "context",
    "0",
    "1.5",
    "\"text\"",
    "b\"x\"",
    "'c'",
    "/// doc\n",
    "{}",
    "[]",
    "if x {}",
    "x?",
    "return",
    "Box<Self>",
    "self: Arc<Self>",
    "self: &Self",
    "&mut self",
    "*const Tensor",
    "fn(Tensor)",
    "T::Output",
    "<T as Trait>::Output",
    "{ 1 + 1 }",
    "Path::<Tensor>",
];

/// The attribute's and the item's tokens; `None` where the bytes are no tokens.
pub(crate) fn input(data: &[u8], seeds: &[Seed]) -> Option<(TokenStream, TokenStream)> {
    let (&kind, data) = data.split_first()?;
    if kind & 7 == 0 {
        let text = std::str::from_utf8(data).ok()?;
        let (options, item) = text.split_once('\n').unwrap_or(("", text));
        return Some((options.parse().ok()?, item.parse().ok()?));
    }
    let mut bytes = Bytes(data);
    let (options, item) = &seeds[bytes.number() % seeds.len()];
    let (mut options, mut item) = (options.parse().ok()?, item.parse().ok()?);
    for _ in 0..kind & 7 {
        let target = if bytes.number() % 8 == 0 { &mut options } else { &mut item };
        *target = mutated(std::mem::take(target), &mut bytes, seeds);
    }
    Some((options, item))
}

/// The bytes that are left; zeros after their end.
struct Bytes<'d>(&'d [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> usize {
        let Some((&byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        byte.into()
    }

    fn number(&mut self) -> usize {
        self.byte() * 256 + self.byte()
    }
}

fn len(tokens: &TokenStream) -> usize {
    let len = |token: TokenTree| match token {
        TokenTree::Group(group) => 1 + len(&group.stream()),
        _ => 1,
    };
    tokens.clone().into_iter().map(len).sum()
}

/// The tokens with a change at one place, in whatever group that is.
fn mutated(tokens: TokenStream, bytes: &mut Bytes<'_>, seeds: &[Seed]) -> TokenStream {
    let count = len(&tokens);
    let mut left = bytes.number() % (count + 1);
    if count == left {
        return [tokens, word(bytes, seeds)].into_iter().collect();
    }
    at(tokens, &mut left, &mut |list, i| change(list, i, bytes, seeds))
}

/// Applies `change` to the list that holds the token that `left` counts down to.
fn at(tokens: TokenStream, left: &mut usize, change: &mut dyn FnMut(&mut Vec<TokenTree>, usize)) -> TokenStream {
    let mut list: Vec<_> = tokens.into_iter().collect();
    for i in 0..list.len() {
        let here = *left == 0;
        *left = left.wrapping_sub(1);
        if here {
            change(&mut list, i);
            break;
        }
        if let TokenTree::Group(group) = &list[i] {
            let inside = len(&group.stream());
            if *left < inside {
                let stream = at(group.stream(), left, change);
                list[i] = Group::new(group.delimiter(), stream).into();
                break;
            }
            *left -= inside;
        }
    }
    list.into_iter().collect()
}

fn change(list: &mut Vec<TokenTree>, i: usize, bytes: &mut Bytes<'_>, seeds: &[Seed]) {
    let other = bytes.byte() % list.len();
    match bytes.byte() % 8 {
        0 => drop(list.remove(i)),
        1 => list.insert(i, list[i].clone()),
        2 => list.swap(i, other),
        3 => list.insert(other, list[i].clone()),
        4 => drop(list.splice(i..=i, word(bytes, seeds))),
        5 => drop(list.splice(i..i, word(bytes, seeds))),
        6 => drop(list.drain(i.min(other)..i.max(other))),
        _ => {
            let delimiters = [Delimiter::Parenthesis, Delimiter::Brace, Delimiter::Bracket, Delimiter::None];
            let delimiter = delimiters[bytes.byte() % delimiters.len()];
            let inside = match &list[i] {
                TokenTree::Group(group) => group.stream(),
                token => token.clone().into(),
            };
            list[i] = Group::new(delimiter, inside).into();
        }
    }
}

/// A word of the dictionary, or another seed's item.
fn word(bytes: &mut Bytes<'_>, seeds: &[Seed]) -> TokenStream {
    let number = bytes.byte() % (DICTIONARY.len() + 1);
    let text = DICTIONARY.get(number).copied().unwrap_or_else(|| &seeds[bytes.number() % seeds.len()].1);
    text.parse().unwrap_or_default()
}
