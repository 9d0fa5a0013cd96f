//! Guarantee *values*, for inputs of every layout, kind and owner: a body sees the same sizes and strides in both
//! passes, and the caller's tensors are its own, before and after.
//!
//! Where nothing else is said each tensor is used once, so that plain autograd is the oracle.

use std::cell::RefCell;

use replay_runtime::Rollout;
use replay_tests::{How, MODES, Oracle, Outcome, Setup, assert_exact, assert_same, bytes, randn, same_bits};
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

fn scale(path: &nn::Path<'_>) -> Tensor {
    path.var("scale", &[1], nn::Init::Const(0.75))
}

fn with_leaf() -> Setup<Tensor> {
    Setup::new(scale).leaf("x", randn(2, &[4, 3, 6, 6], Kind::Float).set_requires_grad(true))
}

/// What a body can see of an input beside its values.
fn look(x: &Tensor) -> String {
    let strides = if x.is_sparse() { Vec::new() } else { x.stride() };
    let lazy = (x.is_conj(), x.is_neg());
    format!("{:?} {:?} {strides:?} {lazy:?} {}", x.kind(), x.size(), x.requires_grad())
}

/// A block over `layout` of the leaf, whose body sees the same input each time.
fn assert_layout(name: &str, layout: impl Fn(&Tensor) -> Tensor) {
    let seen = RefCell::new(Vec::new());
    assert_exact(Oracle::Plain, with_leaf, |how, scale, leaves| {
        let x = layout(&leaves[0].1);
        let mut seen_here = vec![look(&x)];
        let log = std::rc::Rc::new(RefCell::new(Vec::new()));
        let own = std::rc::Rc::clone(&log);
        let y = how.block(name, &[("x", &x)], move |i| {
            own.borrow_mut().push(look(&i[0]));
            let x = if i[0].is_sparse() { i[0].to_dense(None::<Kind>, false) } else { i[0].shallow_clone() };
            let y = &x * &x * scale.to_kind(x.kind());
            if y.is_complex() { y.real() } else { y }
        });
        seen_here.append(&mut log.borrow_mut());
        seen.borrow_mut().push((seen_here, log));
        y.sum(Kind::Float)
    });
    let runs = seen.take();
    assert_eq!(runs.len(), 1 + MODES.len(), "the oracle and each mode");
    let all: Vec<_> = runs.iter().map(|(first, later)| [first.clone(), later.take()].concat()).collect();
    assert_eq!((all[0].len(), all[1].len()), (2, 3), "the caller and a plain run; the caller, a forward and a replay");
    let all = all.concat();
    assert!(all.iter().all(|look| *look == all[0]), "{name}: {all:?}");
}

#[test]
fn every_layout_comes_back_as_it_was() {
    assert_layout("contiguous", |x| x * 1.0);
    assert_layout("transposed", |x| x.transpose(1, 3));
    assert_layout("channels last", |x| x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]));
    assert_layout("offset", |x| x.narrow(1, 1, 2).narrow(3, 2, 3));
    assert_layout("every second", |x| x.slice(3, 1, 6, 2));
    assert_layout("diagonal", |x| x.diagonal(1, 2, 3));
    assert_layout("expanded", |x| x.narrow(0, 0, 1).expand([5, 3, 6, 6], false));
    assert_layout("overlapping", |x| x.view(-1).unfold(0, 7, 2));
    assert_layout("one number", |x| x.view(-1).get(17));
    assert_layout("reversed", |x| x.flip([2]));
    assert_layout("sparse", |x| x.relu().to_sparse(None, None::<&[i64]>, None));
}

/// A tensor without elements gets a gradient without elements, and the scale one of zeros.
#[test]
fn an_empty_input() {
    assert_layout("empty", |x| x.narrow(0, 0, 0));
    assert_layout("empty in the middle", |x| x.narrow(2, 3, 0).transpose(0, 1));
}

#[test]
fn every_kind_comes_back_as_it_was() {
    for kind in [Kind::Double, Kind::BFloat16, Kind::Half, Kind::ComplexFloat, Kind::ComplexDouble] {
        assert_layout("kind", move |x| x.to_kind(kind));
    }
    assert_layout("pairs as complex numbers", |x| x.view([-1, 2]).view_as_complex());
    assert_layout("conjugated", |x| x.view([-1, 2]).view_as_complex().conj());
    assert_layout("negated", |x| x.view([-1, 2]).view_as_complex().conj().imag());
    assert_layout("real parts", |x| x.to_kind(Kind::ComplexFloat).real());
}

/// Inputs that have no gradient: whole numbers of all kinds, truth values.
#[test]
fn inputs_without_gradient() {
    assert_exact(Oracle::Plain, with_leaf, |how, scale, leaves| {
        let x = &leaves[0].1;
        let mut loss = Tensor::from(0f32);
        for kind in [Kind::Uint8, Kind::Int8, Kind::Int16, Kind::Int, Kind::Int64, Kind::Bool] {
            let mask = x.detach().gt(0.0).to_kind(kind);
            let y = how.block("whole", &[("x", &x.select(0, 1)), ("mask", &mask)], move |i| {
                &i[0] * &i[1].select(0, 0) * scale
            });
            loss += y.sum(Kind::Float);
        }
        loss
    });
}

/// The leaf itself is sparse.
#[test]
fn a_sparse_leaf() {
    let setup = || {
        let x = randn(2, &[4, 6], Kind::Float).relu().to_sparse(None, None::<&[i64]>, None).set_requires_grad(true);
        Setup::new(scale).leaf("x", x)
    };
    assert_exact(Oracle::Plain, setup, |how, scale, leaves| {
        let y = how.block("dense", &[("x", &leaves[0].1)], move |i| i[0].to_dense(None::<Kind>, false) * scale);
        y.sum(Kind::Float)
    });
}

/// Two windows on one storage and the storage's own tensor: three contributions, of whole numbers, whose sums are exact
/// in whatever order they are taken.
#[test]
fn views_that_overlap() {
    let setup = || {
        let x = randn(2, &[4, 6], Kind::Double).clamp(-2.0, 2.0).round().set_requires_grad(true);
        Setup::new(|path| path.var_copy("scale", &Tensor::from(3f64))).leaf("x", x)
    };
    assert_exact(Oracle::Plain, setup, |how, scale, leaves| {
        let base = &leaves[0].1 * 2.0;
        let (a, b) = (base.narrow(0, 0, 3), base.narrow(0, 1, 3));
        let y = how.block("windows", &[("a", &a), ("b", &b)], move |i| &i[0] * i[1].square() * scale);
        let z = how.block("whole", &[("base", &base), ("y", &y)], move |i| i[0].narrow(0, 1, 3).square() * &i[1]);
        z.sum(Kind::Double)
    });
}

/// Twice in one block, in another block, and then outside: the caller's tensor is what it was all the time.
#[test]
fn the_callers_tensor_stays_its_own() {
    assert_exact(Oracle::Blockwise, with_leaf, |how, scale, leaves| {
        let x = &leaves[0].1;
        let before = (bytes(x), x.data_ptr().addr(), x.is_leaf());
        let y = how.block("twice", &[("a", x), ("b", x)], move |i| i[0].sin() * &i[1] * scale);
        let z = how.block("once", &[("x", x), ("y", &y)], |i| i[0].cos() + &i[1]);
        let loss = (z * x).sum(Kind::Float);
        assert!(before == (bytes(x), x.data_ptr().addr(), x.is_leaf()));
        loss
    });
}

/// The gradients of a block of four inputs, one of whole numbers among them, by `how`.
fn of_four<'m>(how: &How<'_, 'm>, scale: &'m Tensor, leaves: &[(String, Tensor)]) -> Tensor {
    let rows = Tensor::from_slice(&[3i64, 0, 1]);
    let inputs = [("a", &leaves[0].1), ("b", &leaves[1].1), ("rows", &rows), ("c", &leaves[2].1)];
    let y = how.block("four", &inputs, move |i| {
        assert_eq!(
            [&i[0], &i[1], &i[2], &i[3]].map(Tensor::kind),
            [Kind::Float, Kind::Float, Kind::Int64, Kind::Float]
        );
        (i[0].sin() - i[1].exp()).index_select(0, &i[2]) * scale / &i[3]
    });
    y.sum(Kind::Float)
}

#[test]
fn whole_numbers_between_floats_with_and_without_offload() {
    let setup = || {
        let leaf = |seed, rows| (randn(seed, &[rows, 6], Kind::Float).abs() + 0.5).set_requires_grad(true);
        Setup::new(scale).leaf("a", leaf(2, 4)).leaf("b", leaf(3, 4)).leaf("c", leaf(4, 3))
    };
    let plain = setup();
    let loss = of_four(&How::Plain, &plain.model, &plain.leaves);
    loss.backward();
    let expected = Outcome { loss: loss.detach(), grads: plain.grads() };
    for offload in [false, true] {
        let setup = setup();
        let rollout = Rollout::builder(&setup.vs).offload(offload).build();
        let loss = of_four(&How::Replay(&rollout), &setup.model, &setup.leaves);
        let report = rollout.backward(&loss).unwrap();
        assert_same(&expected, &Outcome { loss: loss.detach(), grads: setup.grads() });
        assert_eq!(report.total.bytes_saved, 4 * (24 + 24 + 18) + 8 * 3);
    }
}

/// The caller lets go of everything at once, and fills what was freed with something else.
#[test]
fn inputs_that_the_caller_frees() {
    let setup = || Setup::new(|path| nn::linear(path, 6, 6, nn::LinearConfig::default()));
    let run = |keep: bool| {
        let setup = setup();
        let model = &setup.model;
        let mut kept = Vec::new();
        let rollout = Rollout::new(&setup.vs);
        let mut h = randn(2, &[50, 6], Kind::Float);
        for seed in 0..20 {
            let noise = randn(seed, &[50, 6], Kind::Float);
            h = rollout
                .block("step", &[("h", &h), ("noise", &noise)], |_, i| model.forward(&i[0]).tanh() * &i[1])
                .unwrap();
            if keep {
                kept.extend([noise, h.shallow_clone()]);
            } else {
                drop(noise);
                let _ = Tensor::full([50, 6], 1e9, (Kind::Float, Device::Cpu));
            }
        }
        let loss = h.sum(Kind::Float);
        rollout.backward(&loss).unwrap();
        Outcome { loss: loss.detach(), grads: setup.grads() }
    };
    assert_same(&run(true), &run(false));
}

/// A wrapper around the block casts what the caller has: what is saved is what the block saw.
#[test]
fn a_wrapper_that_casts_its_inputs() {
    let kinds = RefCell::new(Vec::new());
    let setup = with_leaf();
    let (scale, x) = (&setup.model, &setup.leaves[0].1);
    let rollout = Rollout::new(&setup.vs);
    let wrapped = |x: &Tensor| {
        let cast = x.to_kind(Kind::BFloat16).transpose(0, 1);
        let y = rollout.block("wrapped", &[("x", &cast)], |_, i| {
            kinds.borrow_mut().push((i[0].kind(), i[0].size(), i[0].stride()));
            i[0].sin() * scale.to_kind(Kind::BFloat16)
        });
        y.unwrap().to_kind(Kind::Float)
    };
    let loss = wrapped(x).sum(Kind::Float);
    rollout.backward(&loss).unwrap();
    let kinds = kinds.take();
    assert_eq!(kinds[0], (Kind::BFloat16, vec![3, 4, 6, 6], vec![36, 108, 6, 1]));
    assert_eq!(kinds[0], kinds[1]);

    let plain = with_leaf();
    let (scale, x) = (&plain.model, &plain.leaves[0].1);
    let cast = x.to_kind(Kind::BFloat16).transpose(0, 1);
    (cast.sin() * scale.to_kind(Kind::BFloat16)).to_kind(Kind::Float).sum(Kind::Float).backward();
    assert!(same_bits(&x.grad(), &setup.leaves[0].1.grad()) && same_bits(&scale.grad(), &setup.model.grad()));
}

/// A frozen embedding before the block: no input requires grad, and the block's own weights do.
#[test]
fn no_input_requires_grad_and_the_weights_learn() {
    let build = |path: &nn::Path<'_>| nn::linear(path, 6, 6, nn::LinearConfig::default());
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
        assert_exact(
            Oracle::Plain,
            || Setup::new(build),
            |how, model, _| {
                let frozen = randn(3, &[10, 6], kind);
                let rows = frozen.index_select(0, &Tensor::from_slice(&[1i64, 7, 7]));
                let h = how.block("learns", &[("rows", &rows)], |i| model.forward(&i[0].to_kind(Kind::Float)));
                assert!(h.requires_grad() && !rows.requires_grad());
                h.square().sum(Kind::Float)
            },
        );
    }
}
