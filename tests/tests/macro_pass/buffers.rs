//! The option `buffers` reaches the registry from everywhere a block can stand, beside other options, and only there.
#![allow(dead_code)]

use replay_runtime::replay_block;
use tch::{Tensor, nn};

#[derive(Debug)]
struct Net;

impl Net {
    #[replay_block(buffers)]
    fn lone(&self, x: &Tensor) -> Tensor {
        x.shallow_clone()
    }

    #[replay_block(name = "again", buffers)]
    fn other_options(&self, x: &Tensor) -> Tensor {
        x.shallow_clone()
    }
}

#[replay_block]
impl Net {
    #[replay_block(buffers)]
    fn in_an_impl(&self, x: &Tensor) -> Tensor {
        x.shallow_clone()
    }

    #[replay_block]
    fn without(&self, x: &Tensor) -> Tensor {
        x.shallow_clone()
    }
}

#[replay_block]
impl nn::ModuleT for Net {
    #[replay_block(buffers)]
    fn forward_t(&self, x: &Tensor, #[meta] _train: bool) -> Tensor {
        x.shallow_clone()
    }
}

#[replay_block(buffers)]
fn free(x: &Tensor) -> Tensor {
    x.shallow_clone()
}

#[test]
fn a_block_says_whether_it_updates_buffers() {
    let blocks = replay_runtime::blocks();
    let own = blocks.iter().filter(|block| block.module() == module_path!());
    let found: Vec<_> = own.map(|block| (block.name(), block.updates_buffers())).collect();
    let expected = [
        ("Net::forward_t", true),
        ("Net::in_an_impl", true),
        ("Net::without", false),
        ("free", true),
        ("lone", true),
        ("other_options", true),
    ];
    assert_eq!(found, expected);
}
