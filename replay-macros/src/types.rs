//! What the text of a type tells. A name can be an alias, so an unknown path is neither right nor wrong here: the
//! runtime's traits decide, with messages of their own.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::visit::Visit;
use syn::{GenericArgument, Lifetime, PathArguments, PathSegment, Type, TypeReference};

const PRIMITIVES: &[&str] = &[
    "bool", "char", "f32", "f64", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16", "u32", "u64", "u128",
    "usize", "str",
];

/// Other names that are never a tensor, whatever is in scope.
const DATA: &[&str] = &["String", "PathBuf", "Device", "Kind", "Duration", "Instant"];

/// Generic types of the standard library to which crates give trait impls.
const POINTERS: &[&str] = &["Box", "Rc", "Arc"];

/// Generic types that hold other values; `Option` has a rule of its own.
const CONTAINERS: &[&str] = &[
    "Vec", "VecDeque", "HashMap", "BTreeMap", "HashSet", "BTreeSet", "Box", "Rc", "Arc", "Cow", "RefCell", "Cell",
    "Mutex", "RwLock",
];

/// What the text of a type says about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Tensor,
    /// Holds tensors, but is none.
    Container,
    /// No tensor in it.
    Data,
    Unknown,
}

/// Removes parentheses and the invisible groups of macro variables.
pub(crate) fn peel(mut ty: &Type) -> &Type {
    loop {
        ty = match ty {
            Type::Paren(inner) => &inner.elem,
            Type::Group(inner) => &inner.elem,
            other => return other,
        };
    }
}

pub(crate) fn last_segment(ty: &Type) -> Option<&PathSegment> {
    match peel(ty) {
        Type::Path(path) => path.path.segments.last(),
        _ => None,
    }
}

pub(crate) fn is_named(ty: &Type, name: &str) -> bool {
    last_segment(ty).is_some_and(|segment| segment.ident == name)
}

/// The type arguments of the last segment.
pub(crate) fn arguments(ty: &Type) -> Vec<&Type> {
    let Some(PathArguments::AngleBracketed(arguments)) = last_segment(ty).map(|segment| &segment.arguments) else {
        return Vec::new();
    };
    let types = arguments.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    });
    types.collect()
}

pub(crate) fn is_tensor(ty: &Type) -> bool {
    is_named(ty, "Tensor") && arguments(ty).is_empty()
}

/// The form of a value that is passed or returned as it is, without the references and options of an input.
pub(crate) fn form(ty: &Type) -> Form {
    let ty = peel(ty);
    let name = last_segment(ty).map(|segment| segment.ident.to_string());
    match (ty, name.as_deref()) {
        _ if is_tensor(ty) => Form::Tensor,
        (Type::Path(_), Some("Option")) if !holds_tensor(ty) => match arguments(ty)[..] {
            [inner] => form(inner),
            _ => Form::Unknown,
        },
        (Type::Path(_), Some(name)) if CONTAINERS.contains(&name) || name == "Option" => container_or(Form::Data, ty),
        (Type::Path(_), Some(name)) if PRIMITIVES.contains(&name) || DATA.contains(&name) => Form::Data,
        (Type::Slice(_) | Type::Array(_) | Type::Tuple(_) | Type::Ptr(_) | Type::BareFn(_), _) => {
            container_or(Form::Data, ty)
        }
        (Type::Never(_) | Type::TraitObject(_), _) => Form::Data,
        (Type::Reference(reference), _) => match form(&reference.elem) {
            Form::Tensor => Form::Container,
            other => other,
        },
        _ => Form::Unknown,
    }
}

/// Whether the text of a type tells that no crate but the standard library may give it inherent methods.
pub(crate) fn is_foreign(ty: &Type) -> bool {
    let name = last_segment(ty).map(|segment| segment.ident.to_string());
    match (peel(ty), name.as_deref()) {
        (Type::Path(_), Some(name)) => {
            PRIMITIVES.contains(&name) || POINTERS.contains(&name) && !arguments(ty).is_empty()
        }
        (Type::TraitObject(_), _) => false,
        (ty, _) => !matches!(ty, Type::Path(_) | Type::Macro(_) | Type::Verbatim(_)),
    }
}

fn container_or(otherwise: Form, ty: &Type) -> Form {
    if holds_tensor(ty) { Form::Container } else { otherwise }
}

/// Whether values of the type own or borrow tensors; a function that takes some does not.
pub(crate) fn holds_tensor(ty: &Type) -> bool {
    #[derive(Default)]
    struct Search(bool);

    impl<'ast> Visit<'ast> for Search {
        fn visit_path_segment(&mut self, segment: &'ast PathSegment) {
            self.0 |= segment.ident == "Tensor";
            syn::visit::visit_path_segment(self, segment);
        }

        fn visit_parenthesized_generic_arguments(&mut self, _: &'ast syn::ParenthesizedGenericArguments) {}

        fn visit_type_bare_fn(&mut self, _: &'ast syn::TypeBareFn) {}
    }

    let mut search = Search::default();
    search.visit_type(ty);
    search.0
}

/// `&Rollout<..>`, with its lifetime unless that is elided.
pub(crate) struct RolloutRef {
    pub(crate) lifetime: Option<Lifetime>,
}

pub(crate) fn rollout_ref(ty: &Type) -> Option<RolloutRef> {
    let Type::Reference(TypeReference { elem, mutability: None, .. }) = peel(ty) else { return None };
    let segment = last_segment(elem).filter(|segment| segment.ident == "Rollout")?;
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else {
        return Some(RolloutRef { lifetime: None });
    };
    let lifetime = arguments.args.iter().find_map(|argument| match argument {
        GenericArgument::Lifetime(lifetime) if lifetime.ident != "_" => Some(lifetime.clone()),
        _ => None,
    });
    Some(RolloutRef { lifetime })
}

/// Whether an identifier of this name stands anywhere in the tokens.
pub(crate) fn mentions(tokens: impl ToTokens, name: &str) -> bool {
    fn search(tokens: TokenStream, name: &str) -> bool {
        tokens.into_iter().any(|token| match token {
            TokenTree::Ident(ident) => ident == name,
            TokenTree::Group(group) => search(group.stream(), name),
            _ => false,
        })
    }
    search(tokens.into_token_stream(), name)
}

/// Every lifetime and every reference in what values of a type hold.
#[derive(Default)]
pub(crate) struct Borrows<'ast> {
    pub(crate) lifetimes: Vec<&'ast Lifetime>,
    pub(crate) references: Vec<&'ast TypeReference>,
}

impl<'ast> Borrows<'ast> {
    pub(crate) fn of(ty: &'ast Type) -> Self {
        let mut found = Self::default();
        found.visit_type(ty);
        found
    }
}

impl<'ast> Visit<'ast> for Borrows<'ast> {
    fn visit_lifetime(&mut self, lifetime: &'ast Lifetime) {
        self.lifetimes.push(lifetime);
    }

    fn visit_type_reference(&mut self, reference: &'ast TypeReference) {
        self.references.push(reference);
        syn::visit::visit_type_reference(self, reference);
    }

    // What a function takes and returns, its values do not hold.
    fn visit_parenthesized_generic_arguments(&mut self, _: &'ast syn::ParenthesizedGenericArguments) {}

    fn visit_type_bare_fn(&mut self, _: &'ast syn::TypeBareFn) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ty(text: &str) -> Type {
        syn::parse_str(text).unwrap()
    }

    #[test]
    fn forms_by_text() {
        for (text, expected) in [
            ("Tensor", Form::Tensor),
            ("tch::Tensor", Form::Tensor),
            ("(Tensor)", Form::Tensor),
            ("Vec<Tensor>", Form::Container),
            ("&[Tensor]", Form::Container),
            ("[Tensor; 2]", Form::Container),
            ("Option<Tensor>", Form::Container),
            ("Option<&State>", Form::Unknown),
            ("Option<Option<i64>>", Form::Data),
            ("Option<Vec<State>>", Form::Data),
            ("Option", Form::Unknown),
            ("HashMap<String, Tensor>", Form::Container),
            ("&Tensor", Form::Container),
            ("(Tensor, Tensor)", Form::Container),
            ("i64", Form::Data),
            ("&str", Form::Data),
            ("Vec<i64>", Form::Data),
            ("fn(&Tensor) -> Tensor", Form::Data),
            ("State", Form::Unknown),
            ("Batch<Tensor>", Form::Unknown),
            ("T", Form::Unknown),
        ] {
            assert_eq!(form(&ty(text)), expected, "{text}");
        }
    }

    #[test]
    fn foreign_types_by_text() {
        for text in
            ["&Net", "(Net, Net)", "[Net]", "[Net; 2]", "fn(Net)", "f64", "Box<Net>", "std::sync::Arc<Net>", "(&Net)"]
        {
            assert!(is_foreign(&ty(text)), "{text}");
        }
        for text in ["Net", "a::Net<'_, f64>", "dyn Layer + Send", "(Net)", "net!()", "Box", "Cell<f64>"] {
            assert!(!is_foreign(&ty(text)), "{text}");
        }
    }

    #[test]
    fn rollouts_by_text() {
        let found = |text| rollout_ref(&ty(text)).map(|found| found.lifetime.map(|it| it.to_string()));
        assert_eq!(found("&Rollout<'m>"), Some(Some("'m".to_owned())));
        assert_eq!(found("&replay_runtime::Rollout<'m>"), Some(Some("'m".to_owned())));
        assert_eq!(found("&Rollout<'_>"), Some(None));
        assert_eq!(found("&Rollout"), Some(None));
        assert_eq!(found("&mut Rollout<'m>"), None);
        assert_eq!(found("&Tensor"), None);
    }

    #[test]
    fn idents_are_found_in_groups() {
        assert!(mentions(ty("(u8, [Self; 2])"), "Self"));
        assert!(!mentions(ty("Selfish"), "Self"));
    }
}
