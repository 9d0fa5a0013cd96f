//! The models: each is one step of a rollout, state and conditioning input to state. Those that the Python peers have
//! too are theirs, operation by operation.

use tch::nn::{self, Init, Module, ModuleT};
use tch::{Kind, Tensor};

/// One step of a rollout.
pub(crate) trait Model {
    /// The whole step.
    fn step(&self, state: &Tensor, cond: &Tensor) -> Tensor;

    /// The part of [`step`](Self::step) up to the last operation that saves a tensor for the derivative, without that
    /// operation: all that a replay has to compute. Its result is of no use.
    fn until_last_save(&self, state: &Tensor, cond: &Tensor) -> Tensor;
}

/// A linear layer that draws its weights as PyTorch does, from `1/sqrt(from)` at most: tch's default is 2.4 times that.
fn linear(path: nn::Path<'_>, from: i64, to: i64) -> nn::Linear {
    let bound = 1.0 / float(from).sqrt();
    let ws_init = Init::Uniform { lo: -bound, up: bound };
    nn::linear(path, from, to, nn::LinearConfig { ws_init, ..Default::default() })
}

#[expect(clippy::cast_precision_loss, reason = "widths are small")]
fn float(width: i64) -> f64 {
    width as f64
}

/// `depth` times `state + down(gelu(up(state)))`, after a projection of the conditioning input is added.
pub(crate) struct Mlp {
    cond: nn::Linear,
    layers: Vec<(nn::Linear, nn::Linear)>,
}

impl Mlp {
    pub(crate) fn new(path: &nn::Path<'_>, width: i64, hidden: i64, depth: i64) -> Self {
        let layer = |i: i64| (linear(path / "up" / i, width, hidden), linear(path / "down" / i, hidden, width));
        Self { cond: linear(path / "cond", width, width), layers: (0..depth).map(layer).collect() }
    }

    fn but_last(&self, state: &Tensor, cond: &Tensor) -> (Tensor, Tensor) {
        let (last, layers) = self.layers.split_last().expect("at least one layer");
        let start = state + self.cond.forward(cond);
        let state = layers.iter().fold(start, |state, (up, down)| {
            let inner = up.forward(&state).gelu("none");
            state + down.forward(&inner)
        });
        let inner = last.0.forward(&state).gelu("none");
        (state, inner)
    }
}

impl Model for Mlp {
    fn step(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        let (state, inner) = self.but_last(state, cond);
        state + self.layers.last().expect("at least one layer").1.forward(&inner)
    }

    fn until_last_save(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        self.but_last(state, cond).1
    }
}

/// One causal transformer block, normalised before each half, with four heads.
pub(crate) struct Decoder {
    norms: [nn::LayerNorm; 2],
    qkv: nn::Linear,
    out: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
}

const HEADS: i64 = 4;

impl Decoder {
    pub(crate) fn new(path: &nn::Path<'_>, width: i64) -> Self {
        let norm = |name| nn::layer_norm(path / name, vec![width], nn::LayerNormConfig::default());
        Self {
            norms: [norm("norm1"), norm("norm2")],
            qkv: linear(path / "qkv", width, 3 * width),
            out: linear(path / "out", width, width),
            up: linear(path / "up", width, 4 * width),
            down: linear(path / "down", 4 * width, width),
        }
    }

    fn but_last(&self, state: &Tensor, cond: &Tensor) -> (Tensor, Tensor) {
        let (b, t, d) = state.size3().expect("batch, time, width");
        let qkv = self.qkv.forward(&self.norms[0].forward(&(state + cond)));
        let qkv = qkv.view([b, t, 3, HEADS, d / HEADS]).permute([2, 0, 3, 1, 4]).unbind(0);
        let attention =
            Tensor::scaled_dot_product_attention(&qkv[0], &qkv[1], &qkv[2], None::<&Tensor>, 0.0, true, None, false);
        let state = state + self.out.forward(&attention.transpose(1, 2).reshape([b, t, d]));
        let inner = self.up.forward(&self.norms[1].forward(&state)).gelu("none");
        (state, inner)
    }
}

impl Model for Decoder {
    fn step(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        let (state, inner) = self.but_last(state, cond);
        state + self.down.forward(&inner)
    }

    fn until_last_save(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        self.but_last(state, cond).1
    }
}

/// A small model that reads a large context at every step.
pub(crate) struct Context {
    cond: nn::Linear,
    up: nn::Linear,
}

impl Context {
    pub(crate) fn new(path: &nn::Path<'_>) -> Self {
        Self { cond: linear(path / "cond", 1024, 64), up: linear(path / "up", 64, 64) }
    }
}

impl Model for Context {
    fn step(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        self.until_last_save(state, cond) + self.cond.forward(cond).mean_dim([0i64].as_slice(), true, None::<Kind>)
    }

    fn until_last_save(&self, state: &Tensor, _cond: &Tensor) -> Tensor {
        state + self.up.forward(state).gelu("none")
    }
}

/// A residual block of two 3x3 convolutions, normalised in groups before each.
pub(crate) struct Cnn {
    layers: [(nn::GroupNorm, nn::Conv2D); 2],
}

impl Cnn {
    pub(crate) fn new(path: &nn::Path<'_>, channels: i64) -> Self {
        let layer = |name: &str| {
            let path = path / name;
            let norm = nn::group_norm(&path / "norm", 8, channels, nn::GroupNormConfig::default());
            let config = nn::ConvConfig { padding: 1, ..Default::default() };
            (norm, nn::conv2d(&path / "conv", channels, channels, 3, config))
        };
        Self { layers: [layer("first"), layer("second")] }
    }
}

impl Model for Cnn {
    fn step(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        state + self.layers[1].1.forward(&self.until_last_save(state, cond))
    }

    fn until_last_save(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        let [first, (last_norm, _)] = &self.layers;
        let inner = first.1.forward(&first.0.forward_t(&(state + cond), true).relu());
        last_norm.forward_t(&inner, true).relu()
    }
}

/// A frozen [`Mlp`] of one layer, trained by low-rank adapters beside its three linear layers.
pub(crate) struct Adapted {
    cond: Adapter,
    up: Adapter,
    down: Adapter,
}

struct Adapter {
    frozen: nn::Linear,
    inner: nn::Linear,
    outer: nn::Linear,
}

impl Adapter {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.frozen.forward(input) + self.outer.forward(&self.inner.forward(input))
    }
}

impl Adapted {
    /// A model of which `rank` sets how much is trained.
    pub(crate) fn new(vs: &mut nn::VarStore, width: i64, hidden: i64, rank: i64) -> Self {
        let shapes = [("cond", width, width), ("up", width, hidden), ("down", hidden, width)];
        let frozen = shapes.map(|(name, from, to)| linear(vs.root() / name, from, to));
        vs.freeze();
        let root = vs.root();
        let adapters: Vec<_> = shapes
            .into_iter()
            .zip(frozen)
            .map(|((name, from, to), frozen)| {
                let path = &root / name;
                let plain = |name: &str, from, to| {
                    nn::linear(&path / name, from, to, nn::LinearConfig { bias: false, ..Default::default() })
                };
                Adapter { frozen, inner: plain("inner", from, rank), outer: plain("outer", rank, to) }
            })
            .collect();
        let [cond, up, down] = adapters.try_into().unwrap_or_else(|_| unreachable!("three shapes"));
        Self { cond, up, down }
    }
}

impl Model for Adapted {
    fn step(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        let state = state + self.cond.forward(cond);
        let inner = self.up.forward(&state).gelu("none");
        state + self.down.forward(&inner)
    }

    fn until_last_save(&self, state: &Tensor, cond: &Tensor) -> Tensor {
        let state = state + self.cond.forward(cond);
        let inner = self.up.forward(&state).gelu("none");
        // The last product is with `outer`, which saves what comes out of `inner`.
        drop(self.down.frozen.forward(&inner));
        self.down.inner.forward(&inner)
    }
}
