//! Checks that `unsafe` stands in one folder only, `replay-runtime/src/ffi`.
//!
//! A lint cannot say so: `unsafe_code` is allowed or forbidden for a whole crate, and can be allowed again anywhere.
//! The files are parsed, so that comments and strings do not count.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use proc_macro2::{Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// Where `unsafe` may stand.
const ALLOWED: &str = "replay-runtime/src/ffi";
/// Programs that the compiler is to refuse; some are no valid Rust either.
const UI_CASES: &str = "tests/tests/ui";
/// Texts of expansions, which are compared and never compiled.
const EXPANSIONS: &str = "replay-macros/tests/expand";
/// Macros whose argument is data, not code of the file: what they make is checked where it is compiled.
const QUOTING: [&str; 5] = ["quote", "quote_spanned", "parse_quote", "parse_quote_spanned", "stringify"];

/// One use of `unsafe` in a place that is not for it.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    file: PathBuf,
    line: usize,
    what: &'static str,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// Checks all Rust files of the workspace.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut findings = Vec::new();
    let files = rust_files(root)?;
    for file in &files {
        let text = fs::read_to_string(root.join(file)).with_context(|| format!("{} cannot be read", file.display()))?;
        findings.extend(check(file, &text)?);
    }
    if !findings.is_empty() {
        let list: Vec<_> = findings.iter().map(|finding| format!("\n       {finding}")).collect();
        bail!("`unsafe` outside {ALLOWED}:{}", list.concat());
    }
    println!("{} files: no `unsafe` outside {ALLOWED}", files.len());
    Ok(())
}

/// The Rust files to check, relative to the root, sorted.
fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(root.join(&folder));
        for entry in entries.with_context(|| format!("{} cannot be read", root.join(&folder).display()))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            // A link (`.libtorch` is one) is not of the workspace.
            let kind = entry.file_type()?;
            if kind.is_dir() && is_ours(root, &path) {
                folders.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn is_ours(root: &Path, folder: &Path) -> bool {
    let hidden = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    // Cargo marks each folder of build results with this file.
    let built = root.join(folder).join("CACHEDIR.TAG").exists();
    !hidden && !built && folder != Path::new(ALLOWED) && ![UI_CASES, EXPANSIONS].map(Path::new).contains(&folder)
}

fn check(file: &Path, text: &str) -> Result<Vec<Finding>> {
    let parsed = syn::parse_file(text).map_err(|error| {
        let line = error.span().start().line;
        anyhow::anyhow!("{}:{line}: not valid Rust: {error}", file.display())
    })?;
    let mut finder = Finder { file, findings: Vec::new() };
    finder.visit_file(&parsed);
    Ok(finder.findings)
}

struct Finder<'a> {
    file: &'a Path,
    findings: Vec<Finding>,
}

impl Finder<'_> {
    fn add(&mut self, span: Span, what: &'static str) {
        self.findings.push(Finding { file: self.file.to_path_buf(), line: span.start().line, what });
    }

    /// Tokens handed to a macro are no syntax tree: judge `unsafe` by what follows it.
    fn scan(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Group(group) => self.scan(group.stream()),
                TokenTree::Ident(ident) if ident == "unsafe" => {
                    if let Some(what) = tokens.peek().and_then(begun_by) {
                        self.add(ident.span(), what);
                    }
                }
                _ => {}
            }
        }
    }
}

/// What `unsafe` begins before this token; alone, as in `Token![unsafe]`, it begins nothing.
fn begun_by(next: &TokenTree) -> Option<&'static str> {
    match next {
        TokenTree::Group(group) if group.delimiter() == proc_macro2::Delimiter::Brace => Some("unsafe block"),
        TokenTree::Group(group) if group.delimiter() == proc_macro2::Delimiter::Parenthesis => Some("unsafe attribute"),
        TokenTree::Ident(ident) => match ident.to_string().as_str() {
            "impl" => Some("unsafe impl"),
            "fn" => Some("unsafe fn"),
            "trait" => Some("unsafe trait"),
            "extern" => Some("unsafe extern"),
            _ => None,
        },
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_expr_unsafe(&mut self, node: &'ast syn::ExprUnsafe) {
        self.add(node.unsafe_token.span, "unsafe block");
        visit::visit_expr_unsafe(self, node);
    }

    fn visit_item_impl(&mut self, node: &'ast syn::ItemImpl) {
        if let Some(token) = node.unsafety {
            self.add(token.span, "unsafe impl");
        }
        visit::visit_item_impl(self, node);
    }

    fn visit_item_trait(&mut self, node: &'ast syn::ItemTrait) {
        if let Some(token) = node.unsafety {
            self.add(token.span, "unsafe trait");
        }
        visit::visit_item_trait(self, node);
    }

    fn visit_signature(&mut self, node: &'ast syn::Signature) {
        if let Some(token) = node.unsafety {
            self.add(token.span, "unsafe fn");
        }
        visit::visit_signature(self, node);
    }

    /// Foreign items are unsafe to call, so the block counts even where it is written without the word.
    fn visit_item_foreign_mod(&mut self, node: &'ast syn::ItemForeignMod) {
        self.add(node.abi.extern_token.span, "unsafe extern");
        visit::visit_item_foreign_mod(self, node);
    }

    fn visit_attribute(&mut self, node: &'ast syn::Attribute) {
        if let Some(segment) = node.path().segments.first().filter(|segment| segment.ident == "unsafe") {
            self.add(segment.ident.span(), "unsafe attribute");
        }
        visit::visit_attribute(self, node);
    }

    fn visit_macro(&mut self, node: &'ast syn::Macro) {
        let quoting = node.path.segments.last().is_some_and(|last| QUOTING.iter().any(|name| last.ident == name));
        if !quoting {
            self.scan(node.tokens.clone());
        }
        visit::visit_macro(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, &'static str)> {
        check(Path::new("a.rs"), text).unwrap().into_iter().map(|finding| (finding.line, finding.what)).collect()
    }

    #[test]
    fn every_kind_is_found_on_its_line() {
        let text = "fn f() {\n    unsafe { g() }\n}\nunsafe impl Send for T {}\nunsafe fn g() {}\n\
                    unsafe extern \"C\" { fn h(); }\nextern \"C\" {}\nunsafe trait U {}\n\
                    #[unsafe(no_mangle)]\nfn k() {}\nimpl T { unsafe fn m(&self) {} }\n";
        assert_eq!(
            found(text),
            [
                (2, "unsafe block"),
                (4, "unsafe impl"),
                (5, "unsafe fn"),
                (6, "unsafe extern"),
                (7, "unsafe extern"),
                (8, "unsafe trait"),
                (9, "unsafe attribute"),
                (11, "unsafe fn"),
            ]
        );
    }

    #[test]
    fn code_inside_macros_is_found() {
        assert_eq!(found("fn f() { println!(\"{}\", unsafe { g() }); }"), [(1, "unsafe block")]);
        assert_eq!(found("macro_rules! m {\n () => { unsafe impl Send for T {} };\n}"), [(2, "unsafe impl")]);
    }

    #[test]
    fn comments_strings_and_quoted_code_do_not_count() {
        let text = "// unsafe { }\n/* unsafe fn f() */\n#![forbid(unsafe_code)]\nfn f() { let _ = \"unsafe { }\"; }\n\
                    fn g() { quote::quote! { unsafe fn f() {} }; let _ = Token![unsafe]; }\n\
                    extern \"C\" fn callback() {}\ntype F = unsafe fn();\n";
        assert_eq!(found(text), []);
    }

    #[test]
    fn an_unreadable_file_is_an_error_with_its_line() {
        let error = check(Path::new("a.rs"), "fn f() {}\nfn (").unwrap_err().to_string();
        assert!(error.starts_with("a.rs:2: not valid Rust"), "{error}");
    }

    #[test]
    fn only_files_of_the_workspace_are_read() {
        let root = tempfile::tempdir().unwrap();
        let place = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        for path in [
            "replay-runtime/src/ffi/node.rs",
            "tests/tests/ui/fail/a.rs",
            "replay-macros/tests/expand/a.rs",
            ".git/a.rs",
            "target/debug/a.rs",
        ] {
            place(path);
        }
        place("target/CACHEDIR.TAG");
        for path in ["tests/gradients.rs", "replay-runtime/src/lib.rs", "notes.txt"] {
            place(path);
        }
        assert_eq!(
            rust_files(root.path()).unwrap(),
            [Path::new("replay-runtime/src/lib.rs"), Path::new("tests/gradients.rs")]
        );
    }
}
