//! What a lint says of the method it does not say of the sibling again.
#![allow(unused)]
#![deny(non_snake_case, private_interfaces)]

use replay_runtime::replay_block;
use tch::Tensor;

mod inner {
    #[derive(Clone)]
    struct Private;

    pub struct World;

    impl World {
        #[super::replay_block]
        pub fn Step(&self, X: &super::Tensor, #[meta] data: Private) -> super::Tensor {
            X + 1.0
        }
    }
}

fn main() {}
