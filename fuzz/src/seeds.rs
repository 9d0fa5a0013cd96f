//! What is mutated: the items of the golden files and of the ui cases.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::Attribute;
use syn::visit::Visit;

/// Tokens for the attribute and for its item. As text: tokens cannot be shared.
pub(crate) type Seed = (String, String);

/// All of them, in the order of their files.
pub(crate) fn all() -> &'static [Seed] {
    static SEEDS: LazyLock<Vec<Seed>> = LazyLock::new(read);
    &SEEDS
}

fn read() -> Vec<Seed> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder of the repository");
    let folders = ["replay-macros/tests/expand", "tests/tests/ui/fail", "tests/tests/macro_pass"];
    let mut files: Vec<_> = folders
        .iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).expect("a folder of the repository"))
        .map(|entry| entry.expect("a file of it").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    let mut found = Found::default();
    for file in files {
        let text = fs::read_to_string(&file).expect("text");
        let text = text.split("\n// becomes\n").next().unwrap_or_default();
        // A ui case may be there because it does not parse.
        if let Ok(file) = syn::parse_file(text) {
            found.visit_file(&file);
        }
    }
    assert!(found.0.len() > 100, "only {} items with the attribute", found.0.len());
    found.0
}

#[derive(Default)]
struct Found(Vec<Seed>);

impl Found {
    /// Notes an item for its first mark, which the compiler takes off.
    fn note(&mut self, attrs: &[Attribute], without: impl Fn(Vec<Attribute>) -> TokenStream) {
        let Some(mark) = attrs.iter().position(crate::signature::is_block_mark) else { return };
        let mut attrs = attrs.to_vec();
        let Some(options) = crate::signature::mark_options(&attrs.remove(mark)) else { return };
        self.0.push((options.to_string(), without(attrs).to_string()));
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.note(&item.attrs, |attrs| syn::ItemFn { attrs, ..item.clone() }.into_token_stream());
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.note(&item.attrs, |attrs| syn::ImplItemFn { attrs, ..item.clone() }.into_token_stream());
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.note(&item.attrs, |attrs| syn::ItemImpl { attrs, ..item.clone() }.into_token_stream());
        syn::visit::visit_item_impl(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.note(&item.attrs, |attrs| syn::ItemStruct { attrs, ..item.clone() }.into_token_stream());
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.note(&item.attrs, |attrs| syn::TraitItemFn { attrs, ..item.clone() }.into_token_stream());
    }
}
