//! Every block is registered, called or not, generic or not.
#![allow(dead_code, unused_variables)]

use replay_runtime::replay_block;
use tch::Tensor;

struct Net<T>(T);

impl<T> Net<T> {
    #[replay_block]
    fn never_called<N: Clone + Send + 'static>(
        &self,
        x: &Tensor,
        mask: Option<&Tensor>,
        #[meta] n: N,
    ) -> Result<(Tensor, Tensor), String> {
        Ok((x.shallow_clone(), x.shallow_clone()))
    }
}

#[replay_block]
fn another(x: &Tensor) -> Tensor {
    x.shallow_clone()
}

#[test]
fn a_block_knows_where_it_was_written() {
    let blocks = replay_runtime::blocks();
    let own: Vec<_> = blocks.iter().filter(|block| block.module() == module_path!()).collect();
    let [first, second] = own[..] else { panic!("two blocks, found {own:?}") };
    assert_eq!((first.name(), second.name()), ("another", "never_called"));
    assert_eq!(second.to_string(), concat!(module_path!(), "::never_called"));
    assert_eq!(second.inputs(), ["x", "mask"]);
    assert_eq!(second.outputs(), "Result<(Tensor, Tensor), String>");
    assert!(second.file().ends_with("registry.rs") && second.line() == 10, "{second:?}");
}

#[test]
fn blocks_are_sorted() {
    let blocks = replay_runtime::blocks();
    assert!(blocks.is_sorted_by_key(|block| (block.module(), block.name(), block.line())));
}
