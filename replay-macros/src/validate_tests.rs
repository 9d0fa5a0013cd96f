use proc_macro2::TokenStream;

use crate::args::BlockArgs;
use crate::diagnostics::Diagnostics;
use crate::model::{Block, Owner, Value};
use crate::signature::Method;
use crate::validate::{Place, block};

fn check(text: &str) -> (Option<Block>, Vec<String>) {
    check_with(text, &BlockArgs::default())
}

fn check_with(text: &str, args: &BlockArgs) -> (Option<Block>, Vec<String>) {
    let method: Method = syn::parse_str(text).unwrap();
    let mut diagnostics = Diagnostics::default();
    let block = block(&method, args, &Place::Lone, &mut diagnostics);
    (block, diagnostics.messages())
}

fn accepted(text: &str) -> Block {
    let (block, messages) = check(text);
    block.unwrap_or_else(|| panic!("{text}: {messages:?}"))
}

/// One error, and it says this.
fn rejected(text: &str, expected: &str) {
    let (block, messages) = check(text);
    assert!(block.is_none(), "{text} is accepted");
    assert!(matches!(&messages[..], [only] if only.contains(expected)), "{text}: {messages:?}");
}

#[test]
fn a_plain_method_is_a_block() {
    let block = accepted("fn step(&self, x: &Tensor, #[meta] n: i64) -> Tensor {}");
    assert_eq!(block.sibling, "step_replay");
    assert_eq!(block.lifetime.to_string(), "'rollout");
    assert_eq!((block.inputs().count(), block.metas().count()), (1, 1));
    assert!(!block.nested() && matches!(block.output.value, Value::Shown(_)));
}

#[test]
fn modifiers() {
    rejected("async fn f(x: &Tensor) -> Tensor {}", "`async`");
    rejected("const fn f(x: &Tensor) -> Tensor {}", "`const`");
    rejected("unsafe fn f(x: &Tensor) -> Tensor {}", "`unsafe`");
    rejected("extern \"C\" fn f(x: &Tensor) -> Tensor {}", "`extern`");
    rejected("fn f(x: &Tensor) -> Tensor;", "needs a body");
}

#[test]
fn receivers() {
    accepted("fn f(self: &Self, x: &Tensor) -> Tensor {}");
    rejected("fn f(&mut self, x: &Tensor) -> Tensor {}", "`&mut self`");
    rejected("fn f(self, x: &Tensor) -> Tensor {}", "by value");
    rejected("fn f(mut self, x: &Tensor) -> Tensor {}", "by value");
    rejected("fn f(self: Self, x: &Tensor) -> Tensor {}", "by value");
    rejected("fn f(self: &mut Self, x: &Tensor) -> Tensor {}", "`&mut self`");
    for ty in ["Box<Self>", "Rc<Self>", "Pin<&Self>", "std::sync::Arc<Self>"] {
        rejected(&format!("fn f(self: {ty}, x: &Tensor) -> Tensor {{}}"), "in this version");
    }
}

#[test]
fn inputs() {
    for ty in ["&Tensor", "Tensor", "Option<&Tensor>", "Option<Tensor>", "&tch::Tensor", "State", "&State"] {
        accepted(&format!("fn f(x: {ty}) -> Tensor {{}}"));
    }
    for ty in ["Vec<Tensor>", "&[Tensor]", "[Tensor; 2]", "(Tensor, Tensor)", "Option<Vec<Tensor>>", "&&Tensor"] {
        rejected(&format!("fn f(x: {ty}) -> Tensor {{}}"), "not a container");
    }
    for ty in ["i64", "&str", "String", "Vec<i64>", "Option<i64>", "[i64; 2]"] {
        rejected(&format!("fn f(y: &Tensor, x: {ty}) -> Tensor {{}}"), "mark other data `#[meta]`");
    }
    rejected("fn f(x: &mut Tensor) -> Tensor {}", "in place");
    rejected("fn f(x: &Option<Tensor>) -> Tensor {}", "`Option<&Tensor>`");
    rejected("fn f(#[meta] n: i64) -> Tensor {}", "needs a tensor input");
    rejected("fn f() -> Tensor {}", "needs a tensor input");
    rejected("fn f(x: &'static Tensor) -> Tensor {}", "remove `'static`");
    for ty in ["impl Borrow<Tensor>", "&impl AsTensor", "T", "&T", "Option<&T>", "(T)"] {
        rejected(&format!("fn f<T>(x: {ty}) -> Tensor {{}}"), "has one type");
    }
    accepted("fn f<T>(x: a::T, y: U, #[meta] z: T, #[meta] w: Option<T>, #[meta] v: impl Fn()) -> Tensor {}");
}

#[test]
fn names() {
    accepted("fn f(mut x: Tensor) -> Tensor {}");
    rejected("fn f(_: &Tensor) -> Tensor {}", "as in `_mask`");
    for pattern in ["(a)", "ref x", "x @ y", "Wrapper(x)"] {
        rejected(&format!("fn f({pattern}: &Tensor) -> Tensor {{}}"), "plain name");
    }
}

#[test]
fn metas() {
    for ty in ["i64", "Vec<i64>", "Config", "impl Fn(&Tensor) -> Tensor", "fn(&Tensor) -> i64", "Cow<'static, str>"] {
        accepted(&format!("fn f(x: &Tensor, #[meta] n: {ty}) -> Tensor {{}}"));
    }
    for ty in ["Tensor", "&Tensor", "Vec<Tensor>", "Option<tch::Tensor>"] {
        rejected(&format!("fn f(x: &Tensor, #[meta] n: {ty}) -> Tensor {{}}"), "no gradient");
    }
    for ty in ["&'static str", "Option<&'static [i64]>", "&'static [&'static str]"] {
        accepted(&format!("fn f(x: &Tensor, #[meta] n: {ty}) -> Tensor {{}}"));
    }
    for ty in ["&str", "&'a str", "&'_ str", "&'static mut i64", "&'static [&str]"] {
        rejected(&format!("fn f<'a>(x: &Tensor, #[meta] n: {ty}) -> Tensor {{}}"), "cannot be a reference");
    }
    rejected("fn f(x: &Tensor, #[meta] n: &'static Tensor) -> Tensor {}", "no gradient");
    rejected("fn f<'a>(x: &Tensor, #[meta] n: Cow<'a, str>) -> Tensor {}", "cannot borrow");
    rejected("fn f(x: &Tensor, #[meta(a)] n: i64) -> Tensor {}", "takes no arguments");
    rejected("fn f(x: &Tensor, #[meta] #[meta] n: i64) -> Tensor {}", "twice");
    accepted("fn f(x: &Tensor, #[cfg_attr(a, meta)] y: i64) -> Tensor {}");
    rejected("fn f(x: &Tensor, #[cfg_attr(a, b)] y: i64) -> Tensor {}", "mark other data `#[meta]`");
    rejected("fn f(x: &Tensor, #[meta] #[cfg_attr(a, meta)] y: i64) -> Tensor {}", "twice");
    rejected("fn f(x: &Tensor, #[cfg_attr(a, meta(b))] y: i64) -> Tensor {}", "takes no arguments");
}

#[test]
fn outputs() {
    for ty in ["Tensor", "(Tensor,)", "(Tensor, tch::Tensor)", "Result<Tensor>", "Result<(Tensor, Tensor), E>", "R"] {
        accepted(&format!("fn f(x: &Tensor) -> {ty} {{}}"));
    }
    rejected("fn f(x: &Tensor) {}", "has a tensor output");
    rejected("fn f(x: &Tensor) -> () {}", "has a tensor output");
    rejected("fn f(x: &Tensor) -> f64 {}", "is a tensor");
    rejected("fn f(x: &Tensor) -> ! {}", "is a tensor");
    rejected("fn f(x: &Tensor) -> Vec<Tensor> {}", "not a container");
    rejected("fn f(x: &Tensor) -> Option<Tensor> {}", "always there");
    rejected("fn f(x: &Tensor) -> (Tensor, (Tensor, Tensor)) {}", "flat tuple");
    rejected("fn f(x: &Tensor) -> &Tensor {}", "borrow");
    rejected("fn f(x: &Tensor) -> impl Into<Tensor> {}", "names its output type");
    rejected("fn f(x: &Tensor) -> Result<Result<Tensor, E>, E> {}", "one `Result`");
    rejected("fn f(x: &Tensor) -> (Tensor, Result<Tensor, E>) {}", "outside the tuple");
    rejected("fn f(x: &Tensor) -> Result<f64, E> {}", "is a tensor");
    let many = |count| format!("fn f(x: &Tensor) -> ({}) {{}}", "Tensor, ".repeat(count));
    accepted(&many(12));
    rejected(&many(13), "12 outputs at most");
}

#[test]
fn lifetimes() {
    let lifetime = |text| accepted(text).lifetime.to_string();
    assert_eq!(lifetime("fn f<'a>(&'a self, x: &Tensor) -> Tensor {}"), "'rollout");
    assert_eq!(lifetime("fn f(&'a self, x: &Tensor) -> Tensor {}"), "'a");
    assert_eq!(lifetime("fn f(x: &Tensor) -> Tensor {}"), "'_");
    assert_eq!(lifetime("fn f<'rollout>(&self, x: &'rollout Tensor) -> Tensor {}"), "'rollout_");
    assert_eq!(lifetime("fn f<'m>(&'m self, r: &Rollout<'m>, x: &Tensor) -> Tensor {}"), "'m");
}

#[test]
fn rollouts() {
    assert!(accepted("fn f<'m>(r: &Rollout<'m>, x: &Tensor) -> Tensor {}").nested());
    rejected("fn f(&self, r: &Rollout<'_>, x: &Tensor) -> Tensor {}", "name the lifetime");
    rejected("fn f(&self, r: &Rollout, x: &Tensor) -> Tensor {}", "name the lifetime");
    rejected("fn f<'m>(&self, r: &Rollout<'m>, x: &Tensor) -> Tensor {}", "write `&'m self`");
    rejected("fn f<'m>(&'m self, r: Rollout<'m>, x: &Tensor) -> Tensor {}", "by reference");
    rejected("fn f<'m>(&'m self, r: &Rollout<'m>, s: &Rollout<'m>, x: &Tensor) -> Tensor {}", "one rollout");
    rejected("fn f<'m>(&'m self, r: &Rollout<'m>, x: &'m Tensor) -> Tensor {}", "one call only");
    rejected("fn f<'m>(&'m self, #[meta] r: &Rollout<'m>, x: &Tensor) -> Tensor {}", "passed on by itself");
}

#[test]
fn sibling_names() {
    let named = |name: &str| {
        let name = syn::LitStr::new(name, proc_macro2::Span::call_site());
        let args = BlockArgs { name: Some(name), ..BlockArgs::default() };
        check_with("fn r#loop(x: &Tensor) -> Tensor {}", &args)
    };
    assert_eq!(named("again").0.unwrap().sibling, "again");
    assert_eq!(accepted("fn r#loop(x: &Tensor) -> Tensor {}").sibling, "loop_replay");
    assert!(named("loop").1[0].contains("own name"));
    for wrong in ["two words", "fn", "", "1st"] {
        assert!(named(wrong).1[0].contains("must be an identifier"), "{wrong}");
    }
}

#[test]
fn owners() {
    assert!(matches!(accepted("fn f(x: &Tensor) -> Tensor { g() }").owner, Owner::Free));
    assert!(matches!(accepted("fn f(x: &Tensor) -> Tensor { g(Self::BY) }").owner, Owner::Inherent(None)));
    assert!(matches!(accepted("fn f(&self, x: &Tensor) -> Tensor { g() }").owner, Owner::Inherent(None)));
    assert!(matches!(accepted("fn f(x: &Tensor, #[meta] by: Self) -> Tensor { g() }").owner, Owner::Inherent(None)));
    assert!(matches!(accepted("fn f(x: &Tensor) -> Result<Tensor, Self> { g() }").owner, Owner::Inherent(None)));
}

#[test]
fn the_rollout_takes_a_free_name() {
    assert_eq!(accepted("fn f(&self, x: &Tensor) -> Tensor {}").rollout, "rollout");
    assert_eq!(accepted("fn f(&self, rollout: &Tensor) -> Tensor {}").rollout, "replay_rollout");
}

#[test]
fn every_rule_is_checked_in_one_run() {
    let (_, messages) = check("async unsafe fn f(&mut self, _: i64, #[meta] t: Tensor) -> Vec<Tensor> {}");
    assert_eq!(messages.len(), 7, "{messages:?}");
}

fn impl_errors(text: &str) -> Vec<String> {
    let mut diagnostics = Diagnostics::default();
    crate::impl_block::expand(TokenStream::new(), text.parse().unwrap(), &mut diagnostics);
    diagnostics.messages()
}

#[test]
fn impl_blocks() {
    let method = "fn f(&self, x: &Tensor) -> Tensor {}";
    for header in ["A", "M for A", "M for A<T>", "<T> M for A<T>", "<'a> M for A", "<T, I: Iterator> M for A<T, I>"] {
        assert!(impl_errors(&format!("impl {header} {{ #[replay_block] {method} }}")).is_empty(), "{header}");
    }
    assert!(impl_errors(&format!("impl M for A {{ {method} }}")).is_empty());
    for (header, expected) in
        [("<T> M for T", "blanket"), ("<T> M<T> for A", "trait only"), ("<const N: usize> M<N> for A", "trait only")]
    {
        let found = impl_errors(&format!("impl{header} {{ {method} }}"));
        assert!(matches!(&found[..], [only] if only.contains(expected)), "{header}: {found:?}");
    }
    let unmarked = impl_errors(&format!("impl A {{ {method} }}"));
    assert!(unmarked[0].contains("which methods"), "{unmarked:?}");
    let several = impl_errors(&format!("impl M for A {{ {method} fn g(&self, x: &Tensor) -> Tensor {{}} }}"));
    assert!(several[0].contains("which methods"), "{several:?}");
}

/// The errors of one block are none of the next one's.
#[test]
fn each_block_is_checked_by_itself() {
    let mut diagnostics = Diagnostics::default();
    let mut passes = |text: &str| {
        let method: Method = syn::parse_str(text).unwrap();
        block(&method, &BlockArgs::default(), &Place::Lone, &mut diagnostics).is_some()
    };
    assert!(!passes("const fn f(x: &Tensor) -> Tensor {}"));
    assert!(passes("fn g(x: &Tensor) -> Tensor {}"));
}
