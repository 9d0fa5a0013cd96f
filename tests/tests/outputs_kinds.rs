//! Guarantee *outputs*, for outputs of every kind and layout: they come out as plain calls give them, and so do the
//! gradients. Each block has one use of its weight and one of its input: plain autograd is the oracle.

use replay_runtime::Rollout;
use replay_tests::{Oracle, Setup, assert_exact, bytes, randn};
use tch::{Device, Kind, Tensor, nn};

fn with_leaf() -> Setup<Tensor> {
    Setup::new(|path| path.var("w", &[1], nn::Init::Const(0.75)))
        .leaf("x", randn(2, &[4, 3, 6, 6], Kind::Float).set_requires_grad(true))
}

/// Everything about a tensor but its history.
fn look(y: &Tensor) -> String {
    let strides = if y.is_sparse() { Vec::new() } else { y.stride() };
    let lazy = (y.is_conj(), y.is_neg());
    format!("{:?} {:?} {strides:?} {lazy:?} {} {:?}", y.kind(), y.size(), y.requires_grad(), y.device())
}

fn loss(y: &Tensor) -> Tensor {
    let y = if y.is_sparse() { y.to_dense(None::<Kind>, false) } else { y.shallow_clone() };
    let y = if y.is_complex() { y.square().real() } else { y.exp() };
    y.sum(y.kind()).to_kind(Kind::Float)
}

/// A block that hands out `form` of a product, beside the product's cosine; then a block that takes both.
fn assert_form(name: &'static str, form: fn(&Tensor) -> Tensor) {
    let looks = std::cell::RefCell::new(Vec::new());
    assert_exact(Oracle::Plain, with_leaf, |how, w, leaves| {
        let y = how.block(name, &[("x", &leaves[0].1)], move |i| form(&(&i[0] * w).sin()));
        let again = how.block("again", &[("y", &y)], move |i| {
            let y = if i[0].is_sparse() { i[0].to_dense(None::<Kind>, false) } else { i[0].shallow_clone() };
            (&y + 1.0) * w.to_kind(y.kind())
        });
        looks.borrow_mut().push((look(&y), look(&again), bytes(&y.resolve_conj().resolve_neg())));
        loss(&again)
    });
    let looks = looks.take();
    assert_eq!(looks[0], looks[1], "{name}");
    assert!(looks[0].0.contains("true"), "{name} requires grad");
}

#[test]
fn every_kind() {
    assert_form("float", Tensor::shallow_clone);
    assert_form("double", |y| y.to_kind(Kind::Double));
    assert_form("bfloat16", |y| y.to_kind(Kind::BFloat16));
    assert_form("half", |y| y.to_kind(Kind::Half));
    assert_form("complex", |y| y.to_kind(Kind::ComplexFloat) * Tensor::from(2f32));
    assert_form("complex double", |y| y.to_kind(Kind::ComplexDouble));
    assert_form("pairs as complex numbers", |y| y.view([-1, 2]).view_as_complex());
    assert_form("conjugated", |y| y.view([-1, 2]).view_as_complex().conj());
    assert_form("negated", |y| y.view([-1, 2]).view_as_complex().conj().imag());
}

#[test]
fn every_layout() {
    assert_form("transposed", |y| y.transpose(1, 3));
    assert_form("channels last", |y| y.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]));
    assert_form("a part", |y| y.narrow(1, 1, 2).narrow(3, 2, 3));
    assert_form("every second", |y| y.slice(3, 1, 6, 2));
    assert_form("a diagonal", |y| y.diagonal(1, 2, 3));
    assert_form("expanded", |y| y.narrow(0, 0, 1).expand([5, 3, 6, 6], false));
    assert_form("windows that overlap", |y| y.view(-1).unfold(0, 7, 2));
    assert_form("one number", |y| y.view(-1).get(17));
    assert_form("empty", |y| y.narrow(0, 0, 0));
    assert_form("empty in the middle", |y| y.narrow(2, 3, 0).transpose(0, 1));
    assert_form("sparse", |y| y.relu().to_sparse(None, None::<&[i64]>, None));
}

/// Kernels are chosen by the strides of dimensions of size one too, which nothing else would notice.
#[test]
fn an_input_that_is_returned_keeps_all_its_strides() {
    let setup = || {
        Setup::new(|path| path.var("w", &[4, 4], nn::Init::Randn { mean: 0.0, stdev: 1.0 }))
            .leaf("x", randn(2, &[1, 4, 1], Kind::Float).transpose(-1, -2).set_requires_grad(true))
    };
    assert_exact(Oracle::Plain, setup, |how, w, leaves| {
        let (y, part) = how.block("same", &[("x", &leaves[0].1)], |i| (i[0].shallow_clone(), i[0].narrow(2, 0, 3)));
        assert_eq!((y.stride(), part.stride()), (vec![4, 1, 1], vec![4, 1, 1]));
        how.block("product", &[("y", &y)], move |i| i[0].matmul(w)).sum(Kind::Float) + part.sum(Kind::Float)
    });
}

/// A leaf that the body makes requires grad outside too; its gradient ends there.
#[test]
fn a_leaf_made_in_the_body() {
    let setup = with_leaf();
    let (w, x) = (&setup.model, &setup.leaves[0].1);
    let rollout = Rollout::new(&setup.vs);
    let (own, y) = rollout
        .block("makes", &[("x", x)], move |_, i| {
            (Tensor::ones([6], (Kind::Float, Device::Cpu)).set_requires_grad(true), &i[0] * w)
        })
        .unwrap();
    assert!(own.requires_grad());
    rollout.backward(&(&own * y).sum(Kind::Float)).unwrap();

    let plain = with_leaf();
    (&plain.leaves[0].1 * &plain.model).sum(Kind::Float).backward();
    assert_eq!(bytes(&plain.model.grad()), bytes(&w.grad()));
    assert_eq!(bytes(&plain.leaves[0].1.grad()), bytes(&x.grad()));
    assert!(!own.is_leaf(), "so nobody looks for a gradient there");
}

/// An output of whole numbers that shares its storage is no view of ours, since it has no gradient to lose.
#[test]
fn whole_numbers_that_share_storage() {
    assert_exact(Oracle::Plain, with_leaf, |how, w, leaves| {
        let rows = Tensor::from_slice(&[2i64, 0]);
        let (same, part, y) = how.block("rows", &[("x", &leaves[0].1), ("rows", &rows)], move |i| {
            (i[1].shallow_clone(), i[1].narrow(0, 0, 1), i[0].index_select(0, &i[1]) * w)
        });
        assert_eq!((same.kind(), part.size()), (Kind::Int64, vec![1]));
        y.index_select(0, &(&part - 2)).sum(Kind::Float) * same.sum(Kind::Float)
    });
}

/// A gradient of zeros is a gradient, and one that never arrives is none.
#[test]
fn gradients_of_zeros_and_none() {
    let setup = with_leaf();
    let (w, x) = (&setup.model, &setup.leaves[0].1);
    let idle = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let rollout = Rollout::new(&setup.vs);
    let inputs = [("x", x), ("idle", &idle)];
    let (y, other) = rollout.block("both", &inputs, move |_, i| (&i[0] * w, i[1].exp())).unwrap();
    rollout.backward(&((y * 0.0).sum(Kind::Float) + other.detach().sum(Kind::Float))).unwrap();
    assert_eq!(bytes(&w.grad()), bytes(&w.zeros_like()));
    assert!(x.grad().defined() && !idle.grad().defined());
}
