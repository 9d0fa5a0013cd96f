//! What each operation does. Each uses a tensor that it differentiates once, so that uses can be counted, and hands on
//! dense gradients.

use tch::{Device, Kind, Tensor};

use super::world::{World, is_complex};
use super::{Numbers, Op, Output};

/// Bounds the values of exact programs.
const LARGEST: f64 = 8.0;

impl World {
    /// One operation on tensors `a` and `b`; `b` is `a`'s values alone where the program names one tensor twice.
    pub(super) fn apply(&self, op: Op, a: &Tensor, b: &Tensor) -> Tensor {
        match op {
            Op::Transpose if a.dim() > 1 => a.transpose(-1, -2),
            Op::Transpose => a.unsqueeze(0),
            Op::Slice if a.dim() > 0 && a.size()[0] > 1 => a.narrow(0, 1, a.size()[0] - 1),
            Op::Slice => a.unsqueeze(-1),
            Op::Expand => a.unsqueeze(0).expand([&[2], a.size().as_slice()].concat(), false),
            Op::Detach => a.detach(),
            Op::Sum => self.fit(a).sum(self.kind),
            Op::Argmax => self.indices(a),
            Op::Gather => self.gather(&self.fit(a), b),
            Op::Add => self.fit(a) + self.fit(b),
            Op::Mul => self.bound(self.fit(a) * self.fit(b)),
            Op::Where => {
                let (a, b) = (self.fit(a), self.fit(b));
                a.where_self(&real_part(&b.detach()).gt(0.0), &b)
            }
            Op::Cat => self.cat(&self.fit(a), &self.fit(b)),
            Op::Shift(i) => self.shift(&self.fit(a), i),
            Op::Linear(_) | Op::Scale(_) => self.with_param(op, &self.fit(a)),
            Op::Dropout | Op::Noise | Op::Normal | Op::Seeded => self.drawing(op, &self.fit(a)),
            Op::Read | Op::Tick => self.clocked(op, &self.fit(a)),
            _ => self.elementwise(op, &self.fit(a)),
        }
    }

    /// A tensor in the program's kind and shape.
    fn fit(&self, tensor: &Tensor) -> Tensor {
        let tensor = if tensor.kind() == self.kind { tensor.shallow_clone() } else { tensor.to_kind(self.kind) };
        let numel: i64 = self.shape.iter().product();
        if tensor.size() == self.shape {
            tensor
        } else if i64::try_from(tensor.numel()).is_ok_and(|found| found == numel) {
            tensor.reshape(&self.shape)
        } else {
            tensor.sum(self.kind).expand(&self.shape, false)
        }
    }

    fn exact(&self) -> bool {
        self.numbers == Numbers::Exact
    }

    fn bound(&self, tensor: Tensor) -> Tensor {
        if self.exact() && !is_complex(self.kind) { tensor.clamp(-LARGEST, LARGEST) } else { tensor }
    }

    fn with_param(&self, op: Op, x: &Tensor) -> Tensor {
        let (Op::Linear(i) | Op::Scale(i)) = op else { unreachable!("two operations have parameters") };
        let param = &self.params[i % self.params.len()];
        let out = if self.shape.is_empty() {
            x * param.sum(self.kind)
        } else if param.dim() == 1 {
            x * param
        } else if matches!(op, Op::Linear(_)) {
            x.matmul(param)
        } else {
            x * param.get(0)
        };
        self.bound(out)
    }

    /// Two rows for all: LibTorch gives both parameters one storage as their gradient.
    fn shift(&self, x: &Tensor, i: usize) -> Tensor {
        let [first, second] = [i, i + 1].map(|i| &self.params[i % self.params.len()]);
        let second = if first.data_ptr() == second.data_ptr() { second.detach() } else { second.shallow_clone() };
        let row = |param: &Tensor| if param.dim() == 1 { param.unsqueeze(0) } else { param.narrow(0, 0, 1) };
        self.bound(x + (row(first) + row(&second)))
    }

    fn elementwise(&self, op: Op, x: &Tensor) -> Tensor {
        let complex = is_complex(self.kind);
        let flat = self.shape.is_empty();
        match (op, self.numbers) {
            (Op::InPlace, _) => (x * 2.0).g_add_scalar_(1.0).neg_(),
            (Op::NoGrad, _) => {
                let sign = tch::no_grad(|| real_part(&x.detach()).sign());
                x * sign
            }
            (Op::Squash, Numbers::Real) => x.tanh(),
            (Op::Squash, Numbers::Exact) => self.bound(x.neg()),
            (Op::Curve, _) if complex => x * 3.0,
            (Op::Curve, Numbers::Real) => x.gelu("none"),
            (Op::Curve, Numbers::Exact) => x.relu(),
            (Op::Mix, Numbers::Real) if !complex => x.softmax(-1, self.kind),
            (Op::Mix, _) => self.bound(x.cumsum(-1, self.kind)),
            (Op::Norm, Numbers::Real) if !complex && !flat => {
                x.layer_norm([self.width()], None::<&Tensor>, None::<&Tensor>, 1e-5, false)
            }
            (Op::Norm, _) if flat => x * 2.0,
            (Op::Norm, _) => x.flip([-1]) * 2.0,
            _ => unreachable!("{op:?} is handled above"),
        }
    }

    fn drawing(&self, op: Op, x: &Tensor) -> Tensor {
        let uniform = || Tensor::rand(&self.shape, (Kind::Float, Device::Cpu));
        match op {
            Op::Noise if self.exact() => x * (uniform() * 3.0 - 1.0).floor().to_kind(self.kind),
            Op::Noise => x + uniform().to_kind(self.kind),
            Op::Normal => {
                let one = Tensor::randn([1], (Kind::Float, Device::Cpu));
                let one = if self.exact() { one.sign() } else { one };
                self.fit(&(x * one.to_kind(self.kind).reshape([] as [i64; 0])))
            }
            _ => {
                if op == Op::Seeded {
                    tch::manual_seed(self.seed + 1);
                }
                if is_complex(self.kind) { x * uniform().gt(0.5).to_kind(self.kind) } else { x.dropout(0.5, true) }
            }
        }
    }

    /// A copy of the buffer is a factor: LibTorch does not differentiate with a saved tensor that was changed since.
    fn clocked(&self, op: Op, x: &Tensor) -> Tensor {
        let out = self.fit(&(x * self.clock.copy()));
        if op == Op::Tick {
            let next = if self.exact() { 3.0 - &self.clock } else { &self.clock * 0.5 + 0.75 };
            tch::no_grad(|| self.clock.shallow_clone().copy_(&next));
        }
        self.bound(out)
    }

    /// The second half of `a` and the first half of `b`.
    fn cat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        if self.shape.is_empty() {
            return a - b;
        }
        // Times one: a dense gradient instead of a part of a larger one.
        Tensor::cat(&[a * 1.0, b * 1.0], -1).narrow(-1, self.width() / 2, self.width())
    }

    fn gather(&self, x: &Tensor, index: &Tensor) -> Tensor {
        if self.shape.is_empty() {
            return x * 1.0;
        }
        let index = if index.kind() == Kind::Int64 {
            self.note("integers that select");
            index.flatten(0, -1).remainder(self.width())
        } else {
            Tensor::arange(self.width(), (Kind::Int64, Device::Cpu)).flip([0])
        };
        x.index_select(-1, &index)
    }

    fn indices(&self, tensor: &Tensor) -> Tensor {
        real_part(&self.fit(tensor).detach()).argmax(-1, false)
    }

    /// What a block returns. `values` is what its body has.
    pub(super) fn output(&self, output: &Output, value: &Tensor) -> Tensor {
        match output {
            Output::Value(_) => value.shallow_clone(),
            Output::Doubled(_) => self.fit(value) * 2.0,
            Output::View(_) => self.apply(Op::Transpose, value, value),
            Output::Param(i) => self.params[i % self.params.len()].shallow_clone(),
            Output::Detached(_) => value.detach(),
            Output::Indices(_) => self.indices(value),
        }
    }

    /// What the caller does to a fresh output, in place.
    pub(super) fn change(output: &mut Tensor) {
        let _ = output.g_mul_scalar_(3.0).g_add_scalar_(1.0);
    }

    /// The loss of some tensors.
    pub(super) fn loss(&self, tensors: &[Tensor]) -> Tensor {
        let term = |tensor: &Tensor| {
            let tensor = self.fit(tensor);
            let weight = (Tensor::arange(i64::try_from(tensor.numel()).unwrap_or(0), (Kind::Double, Device::Cpu))
                + 1.0)
                .remainder(3.0)
                .to_kind(self.kind)
                .reshape(&self.shape);
            Self::total(&if self.weighted_loss { tensor * weight } else { tensor })
        };
        tensors.iter().map(term).reduce(|a, b| a + b).expect("a loss is made of something")
    }
}

fn real_part(tensor: &Tensor) -> Tensor {
    if is_complex(tensor.kind()) { tensor.real() } else { tensor.shallow_clone() }
}

impl Op {
    /// The parameters that it reads.
    pub(super) fn params(self) -> Vec<usize> {
        match self {
            Self::Linear(i) | Self::Scale(i) => vec![i],
            Self::Shift(i) => vec![i, i + 1],
            _ => Vec::new(),
        }
    }

    /// Whether it reads a second tensor.
    pub(super) fn is_binary(self) -> bool {
        matches!(self, Self::Add | Self::Mul | Self::Where | Self::Cat | Self::Gather)
    }

    /// Whether it draws random numbers.
    pub(super) fn draws(self) -> bool {
        matches!(self, Self::Dropout | Self::Noise | Self::Normal | Self::Seeded)
    }
}

impl Output {
    /// Which of the `count` tensors of a body it is made of, the newest where it is made of none. It names them from the
    /// newest on.
    pub(super) fn source(&self, count: usize) -> usize {
        let newer = match self {
            Self::Value(i) | Self::Doubled(i) | Self::View(i) | Self::Detached(i) | Self::Indices(i) => i % count,
            Self::Param(_) => 0,
        };
        count - 1 - newer
    }
}
