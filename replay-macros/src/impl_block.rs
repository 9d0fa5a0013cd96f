//! The attribute on an impl block: its marked methods are blocks.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use quote::{ToTokens, TokenStreamExt, quote};
use syn::parse::{ParseStream, Parser};
use syn::visit::Visit;
use syn::{AssocConst, AssocType, Attribute, GenericParam, Ident, ImplItem, ItemImpl, Path};

use crate::args::{self, BlockArgs, Scope};
use crate::diagnostics::Diagnostics;
use crate::signature::{Method, is_block_mark, mark_options};
use crate::validate::{self, Place};
use crate::{carried, expand, fallback, qualify, types};

/// An impl block whose method bodies are raw tokens.
struct ImplBlock {
    /// The impl without its items.
    header: ItemImpl,
    braces: Group,
    /// `#![..]` inside the braces.
    inner_attrs: Vec<Attribute>,
    items: Vec<Item>,
}

enum Item {
    Method(Box<Method>),
    Other(Box<ImplItem>),
}

impl ToTokens for Item {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        match self {
            Self::Method(method) => method.to_tokens(tokens),
            Self::Other(item) => item.to_tokens(tokens),
        }
    }
}

/// ```text
/// Input:   impl World { #[replay_block] fn step(..) .. }
/// Output:  impl World { fn step(..) ..  fn step_replay(..) .. }
///
/// Input:   impl Module for Net { fn forward(..) .. }
/// Output:  impl Module for Net { fn forward(..) .. }  impl Net { pub fn forward_replay(..) .. }
/// ```
pub(crate) fn expand(options: TokenStream, item: TokenStream, diagnostics: &mut Diagnostics) -> TokenStream {
    let block = match parse(item.clone()) {
        Ok(block) => block,
        Err(error) => {
            diagnostics.push(error);
            return item;
        }
    };
    let args = args::parse(options, Scope::Impl, diagnostics);
    check_header(&block.header, diagnostics);
    // Without a type to hold them, not even what stands in for a sibling compiles.
    let homeless = diagnostics.len() > 0;
    let siblings = siblings(&block, args.krate.as_ref(), diagnostics);
    let siblings = if homeless { Vec::new() } else { siblings };
    if block.header.trait_.is_some() {
        let original = emit(&block, &[]);
        let twin = twin(&block, &siblings);
        quote!(#original #twin)
    } else {
        emit(&block, &siblings)
    }
}

/// The last token of an impl is its braces; the rest parses as an empty impl.
fn parse(item: TokenStream) -> syn::Result<ImplBlock> {
    let mut tokens: Vec<TokenTree> = item.into_iter().collect();
    let last = tokens.pop();
    let Some(TokenTree::Group(braces)) = last.filter(is_braces) else {
        return Err(syn::Error::new(proc_macro2::Span::call_site(), "expected an impl block with braces"));
    };
    let mut empty = Group::new(Delimiter::Brace, TokenStream::new());
    empty.set_span(braces.span());
    let header = syn::parse2(tokens.into_iter().chain([TokenTree::Group(empty)]).collect())?;
    let content = |input: ParseStream<'_>| Ok((Attribute::parse_inner(input)?, parse_items(input)?));
    let (inner_attrs, items) = content.parse2(braces.stream())?;
    Ok(ImplBlock { header, braces, inner_attrs, items })
}

fn parse_items(input: ParseStream<'_>) -> syn::Result<Vec<Item>> {
    let mut items = Vec::new();
    while !input.is_empty() {
        let fork = input.fork();
        Attribute::parse_outer(&fork)?;
        items.push(if is_function(&fork) {
            let mut method: Box<Method> = Box::new(input.parse()?);
            method.resolve_marks();
            Item::Method(method)
        } else {
            Item::Other(Box::new(input.parse()?))
        });
    }
    Ok(items)
}

/// Whether `fn` comes before anything that starts another kind of item.
fn is_function(input: ParseStream<'_>) -> bool {
    let fork = input.fork();
    if fork.parse::<syn::Visibility>().is_err() {
        return false;
    }
    while let Ok(token) = fork.parse::<TokenTree>() {
        match token.to_string().as_str() {
            "fn" => return true,
            "const" | "async" | "unsafe" | "extern" | "default" => {}
            text if text.starts_with('"') => {}
            _ => return false,
        }
    }
    false
}

fn check_header(header: &ItemImpl, diagnostics: &mut Diagnostics) {
    for second in header.attrs.iter().filter(|attr| is_block_mark(attr)) {
        diagnostics.error(second, "`#[replay_block]` is given twice; keep one of them");
    }
    let Some((_, path, _)) = &header.trait_ else { return };
    if types::is_foreign(&header.self_ty) {
        diagnostics.error(
            &header.self_ty,
            "only a type of this crate can have the replaying method (E0116); write the impl for one, or wrap this in a struct",
        );
        return;
    }
    for param in header.generics.type_params() {
        if types::last_segment(&header.self_ty).is_some_and(|it| it.ident == param.ident && is_bare(header)) {
            diagnostics.error(
                &header.self_ty,
                "a blanket impl has no type of its own to hold the replaying method; write the impl for one type",
            );
            return;
        }
    }
    for param in &header.generics.params {
        let Some(ident) = unconstrained(param, header) else { continue };
        diagnostics.error(
            ident,
            format!(
                "`{ident}` belongs to the trait only, so an inherent method cannot have it (E0207); use it in the type, or write the impl for one `{}`",
                path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default(),
            ),
        );
    }
}

/// `T`, not `a::T` and not `T<..>`.
fn is_bare(header: &ItemImpl) -> bool {
    matches!(types::peel(&header.self_ty), syn::Type::Path(path) if path.qself.is_none() && path.path.get_ident().is_some())
}

/// A type or const parameter that the self type lacks, and that is bound to no associated type (`Item = T`).
fn unconstrained<'a>(param: &'a GenericParam, header: &ItemImpl) -> Option<&'a Ident> {
    let ident = match param {
        GenericParam::Type(param) => &param.ident,
        GenericParam::Const(param) => &param.ident,
        GenericParam::Lifetime(_) => return None,
    };
    let name = ident.to_string();
    let mut bindings = Bindings { name: &name, found: false };
    bindings.visit_generics(&header.generics);
    (!types::mentions(&header.self_ty, &name) && !bindings.found).then_some(ident)
}

/// Whether a bound says that an associated type or constant is made of it, by which it is known.
struct Bindings<'n> {
    name: &'n str,
    found: bool,
}

impl<'ast> Visit<'ast> for Bindings<'_> {
    fn visit_assoc_type(&mut self, binding: &'ast AssocType) {
        self.found |= types::mentions(&binding.ty, self.name);
        syn::visit::visit_assoc_type(self, binding);
    }

    fn visit_assoc_const(&mut self, binding: &'ast AssocConst) {
        self.found |= types::mentions(&binding.value, self.name);
        syn::visit::visit_assoc_const(self, binding);
    }
}

fn siblings(block: &ImplBlock, krate: Option<&Path>, diagnostics: &mut Diagnostics) -> Vec<(usize, TokenStream)> {
    let methods = block.items.iter().enumerate().filter_map(|(index, item)| match item {
        Item::Method(method) => Some((index, &**method)),
        Item::Other(_) => None,
    });
    let methods: Vec<(usize, &Method)> = methods.collect();
    let is_trait = block.header.trait_.is_some();
    let any_mark = methods.iter().any(|(_, method)| method.marks().next().is_some());
    let implied = is_trait && methods.len() == 1 && !any_mark;
    if !any_mark && !implied {
        diagnostics.error(
            block.header.impl_token,
            "`#[replay_block]` on an impl block needs to know which methods are blocks; mark them `#[replay_block]`",
        );
    }
    let place = place(&block.header);
    let mut siblings = Vec::new();
    for (index, method) in methods {
        if implied || method.marks().next().is_some() {
            let args = method_args(method, krate, diagnostics);
            let sibling = match validate::block(method, &args, &place, diagnostics) {
                Some(mut found) => {
                    if let Some((_, path, _)) = &block.header.trait_ {
                        qualify::block(&mut found, path, &items_of_the_trait(block));
                    }
                    Some(expand::sibling(&found))
                }
                None => fallback::sibling(method, &args, &validate::visibility(method, &place)),
            };
            siblings.extend(sibling.map(|sibling| (index, sibling)));
        }
    }
    siblings
}

/// The types and consts that the impl gives to the trait.
fn items_of_the_trait(block: &ImplBlock) -> Vec<Ident> {
    let name = |item: &Item| match item {
        Item::Other(item) => match &**item {
            ImplItem::Type(item) => Some(item.ident.clone()),
            ImplItem::Const(item) => Some(item.ident.clone()),
            _ => None,
        },
        Item::Method(_) => None,
    };
    block.items.iter().filter_map(name).collect()
}

fn place(header: &ItemImpl) -> Place {
    let name = types::last_segment(&header.self_ty).map(|segment| segment.ident.clone());
    match &header.trait_ {
        Some((_, path, _)) => Place::Trait(name, path.clone()),
        None => Place::Inherent(name),
    }
}

/// The options of the mark on a method; the impl's crate path holds for all of them.
fn method_args(method: &Method, krate: Option<&Path>, diagnostics: &mut Diagnostics) -> BlockArgs {
    let mut marks = method.marks();
    let mut args = BlockArgs::default();
    if let Some(mark) = marks.next() {
        match mark_options(mark) {
            Some(options) => args = args::parse(options, Scope::Method, diagnostics),
            None => diagnostics.error(mark, "malformed mark; write `#[replay_block]` or `#[replay_block(..)]`"),
        }
    }
    for second in marks {
        diagnostics.error(second, "`#[replay_block]` is given twice; keep one of them");
    }
    args.krate = args.krate.or_else(|| krate.cloned());
    args
}

/// The impl as written, but for the marks, with each sibling after its method.
fn emit(block: &ImplBlock, siblings: &[(usize, TokenStream)]) -> TokenStream {
    let mut content = TokenStream::new();
    content.append_all(&block.inner_attrs);
    for (index, item) in block.items.iter().enumerate() {
        item.to_tokens(&mut content);
        content.append_all(siblings.iter().filter(|(at, _)| *at == index).map(|(_, sibling)| sibling));
    }
    let mut braces = Group::new(Delimiter::Brace, content);
    braces.set_span(block.braces.span());
    with_braces(&block.header, braces)
}

fn is_braces(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

/// The header's own tokens end with its empty braces.
fn with_braces(header: &ItemImpl, braces: Group) -> TokenStream {
    let mut header = header.clone();
    header.attrs.retain(|attr| !is_block_mark(attr));
    let mut tokens: Vec<TokenTree> = header.into_token_stream().into_iter().collect();
    tokens.pop();
    tokens.into_iter().chain([TokenTree::Group(braces)]).collect()
}

/// ```text
/// Output:  impl<T> Net<T> where T: Layer { pub fn forward_replay(..) .. }
/// ```
fn twin(block: &ImplBlock, siblings: &[(usize, TokenStream)]) -> Option<TokenStream> {
    let ImplBlock { header, inner_attrs, .. } = block;
    let attrs = [carried::by_twin(&header.attrs), carried::by_twin(inner_attrs)].concat();
    let (generics, _, where_clause) = header.generics.split_for_impl();
    let self_ty = &header.self_ty;
    let siblings = siblings.iter().map(|(_, sibling)| sibling);
    let any = siblings.len() > 0;
    any.then(|| {
        quote! {
            #(#attrs)*
            #[allow(
                private_bounds,
                private_interfaces,
                reason = "a method of a trait is as visible as the trait, its sibling has to be public"
            )]
            impl #generics #self_ty #where_clause {
                #(#siblings)*
            }
        }
    })
}
