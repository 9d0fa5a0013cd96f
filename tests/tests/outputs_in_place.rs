//! Guarantee *outputs*, for what the caller does to them in place: whatever the output is and however it is written,
//! the gradient is plain autograd's, or there is an error, in the forward, at the operation or in `backward`. Never is
//! it another gradient.
//!
//! Plain autograd follows a write to a view through its base, and may then round otherwise; or it refuses, because the
//! operation before has saved what is written. A block's output has no base and no operation before. So there is a
//! second oracle: plain autograd, with a copy taken where the block ends.

use std::error::Error;

use replay_runtime::{ReplayError, Rollout};
use replay_tests::{Outcome, Setup, randn, same_bits};
use tch::{Kind, TchError, Tensor, nn};

type Body = fn(&Tensor, &Tensor) -> Result<(Tensor, Tensor), TchError>;
type Write = fn(&mut Tensor, &Tensor) -> Result<(), TchError>;

fn setup() -> Setup<Tensor> {
    let build = |path: &nn::Path<'_>| path.var_copy("w", &(randn(3, &[6], Kind::Float).abs() + 0.5));
    Setup::new(build).leaf("x", randn(2, &[5, 6], Kind::Float).set_requires_grad(true))
}

fn real(tensor: &Tensor) -> Result<Tensor, TchError> {
    let dense = if tensor.is_sparse() { tensor.f_to_dense(None::<Kind>, false)? } else { tensor.shallow_clone() };
    let real = if dense.is_complex() { dense.f_real()? } else { dense };
    real.f_to_kind(Kind::Float)
}

/// A block's two outputs, the first of which the caller writes: before anything else is done with it, or after.
fn program(
    setup: &Setup<Tensor>,
    block: impl FnOnce(&Tensor) -> Result<(Tensor, Tensor), Box<dyn Error>>,
    write: Write,
    used_before: bool,
) -> Result<Tensor, Box<dyn Error>> {
    let x = &setup.leaves[0].1;
    let h = x.sin() * 2.0;
    let (mut y, other) = block(&h)?;
    let used = if used_before { real(&y)?.f_square()?.f_sum(Kind::Float)? } else { Tensor::from(0f32) };
    write(&mut y, x)?;
    Ok(real(&y)?.f_sum(Kind::Float)? + other.f_square()?.f_sum(Kind::Float)? + used)
}

fn plain(body: Body, write: Write, used_before: bool, copied: bool) -> Result<Outcome, Box<dyn Error>> {
    let setup = setup();
    let block = |h: &Tensor| {
        let (y, other) = body(&setup.model, h)?;
        Ok(if copied { (y.copy(), other) } else { (y, other) })
    };
    let loss = program(&setup, block, write, used_before)?;
    loss.f_backward()?;
    Ok(Outcome { loss: loss.detach(), grads: setup.grads() })
}

fn replayed(body: Body, write: Write, used_before: bool) -> Result<Outcome, Box<dyn Error>> {
    let setup = setup();
    let rollout = Rollout::new(&setup.vs);
    let w = &setup.model;
    let block = |h: &Tensor| Ok(rollout.block("made", &[("h", h)], move |_, i| body(w, &i[0]))?);
    let loss = program(&setup, block, write, used_before)?;
    rollout.backward(&loss)?;
    Ok(Outcome { loss: loss.detach(), grads: setup.grads() })
}

const WRITES: [(&str, Write); 7] = [
    ("scaled", |y, _| y.f_mul_(&Tensor::from(2)).map(drop)),
    ("by a tensor with history", |y, x| y.f_mul_(&x.mean(Kind::Float)).map(drop)),
    ("through a view", |y, _| y.f_select(0, 0)?.f_zero_().map(drop)),
    ("transposed in place", |y, _| y.f_t_().map(drop)),
    ("without grad", |y, _| tch::no_grad(|| y.f_mul_(&Tensor::from(2)).map(drop))),
    ("through a detached twin", |y, _| y.f_detach()?.f_mul_(&Tensor::from(2)).map(drop)),
    ("behind its version", |y, _| y.data().f_mul_(&Tensor::from(2)).map(drop)),
];

/// Whether two outcomes are equal but for the rounding of a few additions.
fn close(a: &Outcome, b: &Outcome) -> bool {
    let close = |a: &Tensor, b: &Tensor| a.allclose(b, 1e-5, 1e-6, false);
    close(&a.loss, &b.loss)
        && a.grads.iter().all(|(name, grad)| match (grad, &b.grads[name]) {
            (Some(a), Some(b)) => close(a, b),
            (a, b) => a.is_none() && b.is_none(),
        })
}

fn equal(a: &Outcome, b: &Outcome) -> bool {
    same_bits(&a.loss, &b.loss)
        && a.grads.iter().all(|(name, grad)| match (grad, &b.grads[name]) {
            (Some(a), Some(b)) => same_bits(a, b),
            (a, b) => a.is_none() && b.is_none(),
        })
}

/// What became of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Right,
    Refused,
    /// Refused, where plain autograd has a gradient.
    RefusedAlone,
}

fn fate(name: &str, body: Body, write: Write, used_before: bool) -> Fate {
    let run = |copied| plain(body, write, used_before, copied).ok();
    let (whole, copied) = (run(false), run(true));
    let Ok(found) = replayed(body, write, used_before) else {
        return if whole.is_some() { Fate::RefusedAlone } else { Fate::Refused };
    };
    let case = format!("{name}, used before: {used_before}");
    assert!([&whole, &copied].into_iter().flatten().any(|oracle| equal(oracle, &found)), "{case}: another gradient");
    assert!(whole.is_none_or(|whole| close(&whole, &found)), "{case}: not plain autograd's gradient");
    Fate::Right
}

/// The fates of all writes on the outputs of `body`, those of one write after the other.
fn fates(body: Body) -> Vec<Fate> {
    WRITES.iter().flat_map(|(name, write)| [false, true].map(|used| fate(name, body, *write, used))).collect()
}

fn sine(w: &Tensor, h: &Tensor) -> Tensor {
    (h * w).sin()
}

const FRESH: [(&str, Body); 17] = [
    ("fresh", |w, h| Ok((sine(w, h), h.cos()))),
    ("a view of a fresh one", |w, h| Ok((sine(w, h).narrow(1, 1, 3), h.cos()))),
    ("transposed", |w, h| Ok((sine(w, h).tr(), h.cos()))),
    ("an einsum, squeezed", |w, h| {
        Ok((Tensor::f_einsum("bi,i->b", &[h, w], None::<&[i64]>)?.unsqueeze(1).squeeze(), h.cos()))
    }),
    ("written inside", |w, h| {
        let y = sine(w, h);
        let _ = y.narrow(0, 0, 1).fill_(3.0);
        Ok((y, h.cos()))
    }),
    ("a view that was written inside", |w, h| Ok((sine(w, h).narrow(0, 0, 2).relu_(), h.cos()))),
    ("expanded", |w, h| Ok((sine(w, h).mean(Kind::Float).expand([3, 4], false), h.cos()))),
    ("whole numbers", |w, h| {
        let y = sine(w, h);
        Ok((y.argmax(1, false), y))
    }),
    ("truth values", |w, h| {
        let y = sine(w, h);
        Ok((y.gt(0.0), y))
    }),
    ("empty", |w, h| Ok((sine(w, h).narrow(0, 0, 0), h.cos()))),
    ("one number", |w, h| Ok((sine(w, h).sum(Kind::Float), h.cos()))),
    ("complex", |w, h| Ok((sine(w, h).to_kind(Kind::ComplexFloat).square(), h.cos()))),
    ("a real part", |w, h| Ok((sine(w, h).to_kind(Kind::ComplexFloat).square().real(), h.cos()))),
    ("bfloat16", |w, h| Ok((sine(w, h).to_kind(Kind::BFloat16), h.cos()))),
    ("half", |w, h| Ok((sine(w, h).to_kind(Kind::Half), h.cos()))),
    ("double", |w, h| Ok((sine(w, h).to_kind(Kind::Double), h.cos()))),
    ("constant", |w, h| Ok((h.detach().exp(), sine(w, h)))),
];

#[test]
fn a_fresh_output_may_be_written_where_plain_autograd_allows_it() {
    for (name, body) in FRESH {
        let fates = fates(body);
        assert!(!fates.contains(&Fate::RefusedAlone), "{name}: {fates:?}");
        assert!(fates.contains(&Fate::Right), "{name}: {fates:?}");
    }
}

const ALIASED: [(&str, Body); 14] = [
    ("an input", |w, h| Ok((h.shallow_clone(), sine(w, h)))),
    ("an input of its own kind", |w, h| Ok((h.to_kind(Kind::Float), sine(w, h)))),
    ("a view of an input", |w, h| Ok((h.view([6, 5]), sine(w, h)))),
    ("a view of an input that nobody saves", |w, h| Ok((h.view([6, 5]), h + w))),
    ("a part of an input", |w, h| Ok((h.narrow(0, 1, 2), sine(w, h)))),
    ("a detached input", |w, h| Ok((h.detach(), sine(w, h)))),
    ("a detached input that nobody saves", |w, h| Ok((h.detach(), h + w))),
    ("a parameter", |w, h| Ok((w.shallow_clone(), sine(w, h)))),
    ("a view of a parameter", |w, h| Ok((w.view([2, 3]), sine(w, h)))),
    ("a detached parameter", |w, h| Ok((w.detach(), sine(w, h)))),
    ("a detached parameter that nobody saves", |w, h| Ok((w.detach(), h + w))),
    ("one tensor twice", |w, h| {
        let y = sine(w, h);
        Ok((y.shallow_clone(), y))
    }),
    ("a detached twin", |w, h| {
        let y = sine(w, h);
        Ok((y.detach(), y))
    }),
    ("a part and the whole", |w, h| {
        let y = sine(w, h);
        Ok((y.narrow(0, 0, 2), y))
    }),
];

/// All the more than plain autograd refuses: it is refused, but for a write behind the version of an output that only
/// another output shares, which changes no gradient.
#[test]
fn an_output_that_shares_storage_is_refused_or_right() {
    for (name, body) in ALIASED {
        let fates = fates(body);
        let (seen, behind) = fates.split_at(fates.len() - 2);
        assert!(!seen.contains(&Fate::Right), "{name}: {fates:?}");
        let between_outputs = name.contains("twice") || name.contains("twin") || name.contains("whole");
        assert_eq!(behind.contains(&Fate::Right), between_outputs, "{name}: {fates:?}");
    }
}

/// LibTorch writes to the input through its view before the body ends.
#[test]
fn a_view_of_an_input_that_the_body_writes_is_an_error_in_the_forward() {
    let setup = setup();
    let (w, h) = (&setup.model, setup.leaves[0].1.detach() * 2.0);
    let rollout = Rollout::new(&setup.vs);
    let error = rollout.block("writes", &[("h", &h)], |_, i| i[0].slice(0, None, None, 1).relu_() * w).unwrap_err();
    assert!(matches!(&error, ReplayError::InputWritten { input, .. } if input == "h"), "{error}");
}
