//! What the compiler says about a block that breaks a rule: one case per rule, each with its stored message.
//!
//! `TRYBUILD=overwrite cargo test --test ui` stores the messages anew; read the difference before keeping it.

#[test]
fn messages() {
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*.rs");
}
