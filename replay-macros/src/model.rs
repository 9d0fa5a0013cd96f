//! A block that passed every rule. Its states are the valid ones only, so that [`expand`](crate::expand) decides
//! nothing.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;
use syn::ext::IdentExt;
use syn::{Attribute, Generics, Ident, Lifetime, Path, Token, Type, Visibility};

/// One method to be given a sibling.
pub(crate) struct Block {
    /// The method's own tokens, which the sibling's take the place of.
    pub(crate) function: Token![fn],
    pub(crate) braces: Span,
    pub(crate) method: Ident,
    pub(crate) sibling: Ident,
    pub(crate) vis: Visibility,
    /// The attributes that the sibling has of the method.
    pub(crate) attrs: Vec<Attribute>,
    /// The sibling's generics.
    pub(crate) generics: Generics,
    pub(crate) receiver: Option<Receiver>,
    /// What `Rollout<..>` is applied to; `'_` where nothing has to outlive the rollout.
    pub(crate) lifetime: Lifetime,
    /// The name of the sibling's rollout parameter.
    pub(crate) rollout: Ident,
    /// All but the receiver, in the method's order.
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) output: Output,
    pub(crate) context: Option<Path>,
    /// The block may update non-trainable variables.
    pub(crate) buffers: bool,
    /// Its replay may end, by unwinding, before the body does.
    pub(crate) early_stop: bool,
    pub(crate) owner: Owner,
    pub(crate) krate: CratePath,
}

impl Block {
    pub(crate) fn nested(&self) -> bool {
        self.parameters.iter().any(|parameter| matches!(parameter.role, Role::Rollout))
    }

    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| matches!(parameter.role, Role::Input))
    }

    pub(crate) fn metas(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| matches!(parameter.role, Role::Meta))
    }

    /// The name in messages and in the registry.
    pub(crate) fn name(&self) -> String {
        let method = self.method.unraw();
        match &self.owner {
            Owner::Inherent(Some(owner)) | Owner::Trait(Some(owner), _) => format!("{}::{method}", owner.unraw()),
            _ => method.to_string(),
        }
    }
}

/// `&self`; its lifetime is the block's.
pub(crate) struct Receiver {
    pub(crate) self_token: Token![self],
}

pub(crate) struct Parameter {
    pub(crate) ident: Ident,
    pub(crate) ty: Type,
    pub(crate) cfgs: Vec<Attribute>,
    pub(crate) role: Role,
}

pub(crate) enum Role {
    Input,
    Meta,
    Rollout,
}

/// The declared output, and what the sibling's `Ok` holds.
pub(crate) struct Output {
    pub(crate) declared: Type,
    pub(crate) value: Value,
}

pub(crate) enum Value {
    /// Known from the text: a tensor, a tuple, or the `Ok` of a `Result`.
    Shown(Box<Type>),
    /// An alias or a type parameter: the trait tells.
    Projected,
}

/// How the method is reached from its sibling; with the name of the type where the attribute sees it.
pub(crate) enum Owner {
    Free,
    Inherent(Option<Ident>),
    Trait(Option<Ident>, Path),
}

/// The runtime's path: `::replay_runtime` unless the user gave one.
#[derive(Clone)]
pub(crate) struct CratePath(pub(crate) Option<Path>);

impl ToTokens for CratePath {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        match &self.0 {
            Some(path) => path.to_tokens(tokens),
            None => tokens.extend(quote::quote!(::replay_runtime)),
        }
    }
}

/// `step_replay` of `step`.
pub(crate) fn default_name(method: &Ident) -> Ident {
    Ident::new(&format!("{}_replay", unraw(method)), method.span())
}

/// `type` of `r#type`.
pub(crate) fn unraw(ident: &Ident) -> String {
    IdentExt::unraw(ident).to_string()
}
