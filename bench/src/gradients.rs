//! The gradients of a setup: norm, hash and comparison.

use tch::{Kind, Tensor};

use crate::workload::Setup;

/// The gradients by name, sorted; `None` where none arrived.
pub(crate) type Gradients = Vec<(String, Option<Tensor>)>;

/// All gradients of a setup.
pub(crate) fn gradients(setup: &Setup) -> Gradients {
    let grad = |tensor: &Tensor| Some(tensor.grad()).filter(Tensor::defined);
    let mut all: Vec<_> = setup.vs.variables().iter().map(|(name, tensor)| (name.clone(), grad(tensor))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn squares(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[])
}

/// The norm of all of them together.
pub(crate) fn norm(gradients: &Gradients) -> f64 {
    gradients.iter().filter_map(|(_, grad)| grad.as_ref()).map(squares).sum::<f64>().sqrt()
}

/// The norm of the difference over that of `expected`; infinite where one has a gradient and the other has none.
pub(crate) fn difference(found: &Gradients, expected: &Gradients) -> f64 {
    let pairs = found.iter().zip(expected);
    let squared = pairs.map(|((_, a), (_, b))| match (a, b) {
        (Some(a), Some(b)) => squares(&(a.to_kind(Kind::Double) - b.to_kind(Kind::Double))),
        (None, None) => 0.0,
        _ => f64::INFINITY,
    });
    squared.sum::<f64>().sqrt() / norm(expected)
}

/// A hash (FNV-1a) of the names, of which gradients there are, and of all their bits.
pub(crate) fn fingerprint(gradients: &Gradients) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    for (name, grad) in gradients {
        name.bytes().for_each(&mut feed);
        feed(u8::from(grad.is_some()));
        grad.iter().flat_map(bytes).for_each(&mut feed);
    }
    format!("{hash:016x}")
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.contiguous();
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(values: &[f32]) -> Gradients {
        vec![("w".to_owned(), Some(Tensor::from_slice(values))), ("v".to_owned(), None)]
    }

    #[test]
    fn a_single_bit_changes_the_hash() {
        assert_eq!(fingerprint(&one(&[1.0, 2.0])), fingerprint(&one(&[1.0, 2.0])));
        assert_ne!(fingerprint(&one(&[1.0, 2.0])), fingerprint(&one(&[1.0, f32::from_bits(2.0_f32.to_bits() + 1)])));
        assert_ne!(fingerprint(&one(&[0.0])), fingerprint(&one(&[-0.0])));
    }

    #[test]
    fn a_missing_gradient_is_no_zero() {
        let mut none = one(&[0.0]);
        none[0].1 = None;
        assert_ne!(fingerprint(&none), fingerprint(&one(&[0.0])));
        assert!(difference(&none, &one(&[1.0])).is_infinite());
    }

    #[test]
    fn the_difference_is_relative() {
        assert!((difference(&one(&[3.0, 4.5]), &one(&[3.0, 4.0])) - 0.1).abs() < 1e-12);
        assert!((norm(&one(&[3.0, 4.0])) - 5.0).abs() < 1e-12);
    }
}
