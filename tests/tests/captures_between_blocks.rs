//! Guarantee *captures*, for what leaves a body by another way than its outputs and is read by another block's body: its
//! gradient would end at the leaf that stood for the first block's input.

use std::cell::RefCell;

use replay_runtime::{ReplayError, Rollout};
use replay_tests::same_bits;
use tch::{Device, Kind, Tensor, nn};

/// A model with a cache that its blocks fill and read.
#[derive(Default)]
struct Cache(RefCell<Option<Tensor>>);

impl Cache {
    fn fill(&self, tensor: Tensor) {
        *self.0.borrow_mut() = Some(tensor);
    }

    fn read(&self) -> Tensor {
        self.0.borrow().as_ref().expect("it was filled").shallow_clone()
    }
}

fn leaf() -> Tensor {
    Tensor::ones([8], (Kind::Float, Device::Cpu)).set_requires_grad(true)
}

/// The block `keeps` fills the cache with what `keep` makes of its input, and another reads it.
fn run(nested: bool, keep: fn(&Tensor) -> Tensor) -> Result<Tensor, ReplayError> {
    let (store, cache, x) = (nn::VarStore::new(Device::Cpu), Cache::default(), leaf());
    let cache = &cache;
    let rollout = Rollout::new(&store);
    let keeps = move |_: &Rollout<'_>, i: &[Tensor]| {
        cache.fill(keep(&i[0]));
        i[0].sin()
    };
    let y = if nested {
        rollout.block("outer", &[("x", &x)], move |rollout, i| {
            let h = rollout.block("keeps", &[("h", &(&i[0] * 2.0))], keeps)?;
            Ok::<_, ReplayError>(h * cache.read())
        })?
    } else {
        let h = rollout.block("keeps", &[("h", &(&x * 2.0))], keeps)?;
        rollout.block("reads", &[("h", &h)], move |_, i| &i[0] * cache.read())?
    };
    rollout.backward(&y.sum(Kind::Float))?;
    Ok(x.grad())
}

fn assert_refused(nested: bool, keep: fn(&Tensor) -> Tensor) {
    let error = run(nested, keep).unwrap_err();
    let escaped = |error: &ReplayError| matches!(error, ReplayError::Escaped { block, input } if block == "keeps" && input == "h");
    assert!(escaped(&error), "{error:?}");
}

#[test]
fn an_input_kept_by_one_block_and_read_by_the_next_is_an_error() {
    assert_refused(false, Tensor::shallow_clone);
}

#[test]
fn an_input_kept_by_an_inner_block_and_read_by_the_outer_one_is_an_error() {
    assert_refused(true, Tensor::shallow_clone);
}

#[test]
fn what_an_inner_block_computes_and_keeps_is_one_too() {
    assert_refused(true, |h| h * 3.0);
}

#[test]
fn what_is_kept_detached_is_a_constant() {
    for nested in [false, true] {
        let x = leaf();
        let h = &x * 2.0;
        (h.sin() * h.detach()).sum(Kind::Float).backward();
        assert!(same_bits(&run(nested, Tensor::detach).unwrap(), &x.grad()), "nested: {nested}");
    }
}
