//! A trait's own types and consts, as a sibling outside of the trait impl has to name them.

use syn::visit_mut::VisitMut;
use syn::{ExprPath, Ident, Path, QSelf, TypePath, parse_quote};

use crate::model::{Block, Value};

/// ```text
/// Input:   impl Dynamics for World { type Noise = f64;  fn step(.., #[meta] noise: Self::Noise) .. }
/// Output:  noise: <Self as Dynamics>::Noise
/// ```
///
/// Outside the trait impl, `Self::Noise` would be ambiguous.
pub(crate) fn block(found: &mut Block, path: &Path, names: &[Ident]) {
    let mut qualify = Qualify { path, names };
    qualify.visit_generics_mut(&mut found.generics);
    for parameter in &mut found.parameters {
        qualify.visit_type_mut(&mut parameter.ty);
    }
    qualify.visit_type_mut(&mut found.output.declared);
    if let Value::Shown(ty) = &mut found.output.value {
        qualify.visit_type_mut(ty);
    }
}

struct Qualify<'a> {
    path: &'a Path,
    names: &'a [Ident],
}

impl Qualify<'_> {
    /// `<Self as Dynamics>::Noise` of `Self::Noise`.
    fn qualified(&self, qself: Option<&QSelf>, path: &Path) -> Option<TypePath> {
        let mut segments = path.segments.iter();
        let (first, name) = (segments.next()?, segments.next()?);
        let own = first.ident == "Self" && self.names.contains(&name.ident);
        let path = self.path;
        (own && qself.is_none() && segments.next().is_none()).then(|| parse_quote!(<Self as #path>::#name))
    }
}

impl VisitMut for Qualify<'_> {
    fn visit_type_path_mut(&mut self, ty: &mut TypePath) {
        syn::visit_mut::visit_type_path_mut(self, ty);
        if let Some(qualified) = self.qualified(ty.qself.as_ref(), &ty.path) {
            *ty = qualified;
        }
    }

    /// The length of an array.
    fn visit_expr_path_mut(&mut self, expr: &mut ExprPath) {
        syn::visit_mut::visit_expr_path_mut(self, expr);
        if let Some(TypePath { qself, path }) = self.qualified(expr.qself.as_ref(), &expr.path) {
            (expr.qself, expr.path) = (qself, path);
        }
    }
}
