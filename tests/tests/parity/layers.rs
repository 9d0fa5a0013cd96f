//! What blocks are made of. The counterpart of `tests/parity/layers.py`.

use replay_runtime::{ReplayError, Rollout, replay_block};
use tch::nn::{self, Module, ModuleT, RNN};
use tch::{Reduction, Tensor};

use crate::run::{Run, check};

/// A layer of its own name.
fn linear(path: &nn::Path<'_>, name: &str, from: i64, to: i64) -> nn::Linear {
    nn::linear(path / name, from, to, nn::LinearConfig::default())
}

struct GruCell {
    input: Tensor,
    hidden: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
}

impl GruCell {
    fn new(path: &nn::Path<'_>) -> Self {
        let path = path / "cell";
        Self {
            input: path.zeros("weight_ih", &[12, 3]),
            hidden: path.zeros("weight_hh", &[12, 4]),
            input_bias: path.zeros("bias_ih", &[12]),
            hidden_bias: path.zeros("bias_hh", &[12]),
        }
    }

    #[replay_block]
    fn step(&self, x: &Tensor, state: &Tensor) -> Tensor {
        x.gru_cell(state, &self.input, &self.hidden, Some(&self.input_bias), Some(&self.hidden_bias))
    }
}

pub(crate) fn a_gru_cell_over_four_steps(name: &str) {
    check(name, GruCell::new, |rollout, cell, run| {
        let mut state = run.leaf("state");
        for i in 0..4 {
            state = cell.step_replay(rollout, &run.leaf(&format!("x{i}")), &state)?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn an_lstm_layer(name: &str) {
    let build = |path: &nn::Path<'_>| nn::lstm(path / "lstm", 3, 4, nn::RNNConfig::default());
    check(name, build, |rollout, lstm, run| {
        let (mut h, mut c) = (run.leaf("h"), run.leaf("c"));
        for i in 0..2 {
            let x = run.leaf(&format!("x{i}"));
            let y;
            (y, h, c) = rollout.block("lstm", &[("x", &x), ("h", &h), ("c", &c)], |_, i| {
                let state = nn::LSTMState((i[1].shallow_clone(), i[2].shallow_clone()));
                let (y, nn::LSTMState((h, c))) = lstm.seq_init(&i[0], &state);
                (y, h, c)
            })?;
            run.output(&format!("y{i}"), &y);
        }
        run.output("c", &c);
        Ok(())
    });
}

struct Residual {
    first: nn::Conv2D,
    norm: nn::GroupNorm,
    second: nn::Conv2D,
}

impl Residual {
    fn new(path: &nn::Path<'_>) -> Self {
        let padded = nn::ConvConfig { padding: 1, ..Default::default() };
        Self {
            first: nn::conv2d(path / "first", 2, 4, 3, padded),
            norm: nn::group_norm(path / "norm", 2, 4, nn::GroupNormConfig::default()),
            second: nn::conv2d(path / "second", 4, 2, 1, nn::ConvConfig::default()),
        }
    }

    #[replay_block]
    fn step(&self, image: &Tensor) -> Tensor {
        image + self.second.forward(&self.norm.forward(&self.first.forward(image)).gelu("none"))
    }
}

pub(crate) fn convolutions(name: &str) {
    check(name, Residual::new, |rollout, model, run| {
        let mut image = run.leaf("image");
        for _ in 0..2 {
            image = model.step_replay(rollout, &image)?;
        }
        run.output("image", &image);
        Ok(())
    });
}

pub(crate) fn a_strided_convolution_in_f64(name: &str) {
    let config = nn::ConvConfig { stride: 2, ..Default::default() };
    let build = |path: &nn::Path<'_>| nn::conv1d(path / "conv", 2, 3, 3, config);
    check(name, build, |rollout, conv, run| {
        let y = rollout.block("conv", &[("x", &run.leaf("x"))], |_, x| conv.forward(&x[0]).tanh())?;
        run.output("y", &y);
        Ok(())
    });
}

struct Attention {
    norm: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
}

impl Attention {
    fn new(path: &nn::Path<'_>) -> Self {
        Self {
            norm: nn::layer_norm(path / "norm", vec![6], nn::LayerNormConfig::default()),
            qkv: linear(path, "qkv", 6, 18),
            out: linear(path, "out", 6, 6),
        }
    }

    #[replay_block]
    fn step(&self, x: &Tensor, mask: Option<&Tensor>, #[meta] causal: bool) -> Tensor {
        let qkv = self.qkv.forward(&self.norm.forward(x)).chunk(3, -1);
        let [q, k, v] = [0, 1, 2].map(|i: usize| qkv[i].view([2, 4, 2, 3]).transpose(1, 2));
        let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, causal, None, false);
        x + self.out.forward(&mixed.transpose(1, 2).reshape([2, 4, 6]))
    }

    /// Two blocks.
    fn run<'m>(
        &'m self,
        rollout: &Rollout<'m>,
        run: &Run,
        mask: Option<&Tensor>,
        causal: bool,
    ) -> Result<(), ReplayError> {
        let x = self.step_replay(rollout, &run.leaf("x"), mask, causal)?;
        run.output("x", &self.step_replay(rollout, &x, mask, causal)?);
        Ok(())
    }
}

pub(crate) fn self_attention(name: &str) {
    check(name, Attention::new, |rollout, model, run| model.run(rollout, run, None, false));
}

pub(crate) fn causal_attention_in_f64(name: &str) {
    check(name, Attention::new, |rollout, model, run| model.run(rollout, run, None, true));
}

pub(crate) fn attention_with_a_boolean_mask(name: &str) {
    check(name, Attention::new, |rollout, model, run| model.run(rollout, run, Some(&run.input("mask")), false));
}

pub(crate) fn attention_with_a_trained_bias(name: &str) {
    check(name, Attention::new, |rollout, model, run| model.run(rollout, run, Some(&run.leaf("mask")), false));
}

pub(crate) fn attention_under_autocast(name: &str) {
    check(name, Attention::new, |rollout, model, run| {
        let _autocast = run.autocast();
        model.run(rollout, run, None, false)
    });
}

struct Wide {
    norm: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Wide {
    fn new(path: &nn::Path<'_>) -> Self {
        let norm = nn::layer_norm(path / "norm", vec![6], nn::LayerNormConfig::default());
        Self { norm, up: linear(path, "up", 6, 12), down: linear(path, "down", 12, 6) }
    }

    #[replay_block]
    fn step(&self, x: &Tensor) -> Tensor {
        x + self.down.forward(&self.up.forward(&self.norm.forward(x)).silu())
    }
}

pub(crate) fn layer_norm_and_a_wide_layer(name: &str) {
    check(name, Wide::new, |rollout, model, run| {
        let mut x = run.leaf("x");
        for _ in 0..3 {
            x = model.step_replay(rollout, &x)?;
        }
        run.output("x", &x);
        Ok(())
    });
}

pub(crate) fn batch_norm_in_eval_mode(name: &str) {
    let build = |path: &nn::Path<'_>| {
        let norm = nn::batch_norm1d(path / "norm", 4, nn::BatchNormConfig::default());
        (linear(path, "linear", 6, 4), norm)
    };
    check(name, build, |rollout, (linear, norm), run| {
        let inputs = [("x", &run.leaf("x"))];
        let y = rollout.block("step", &inputs, |_, x| norm.forward_t(&linear.forward(&x[0]), false))?;
        run.output("y", &y);
        Ok(())
    });
}

fn table(path: &nn::Path<'_>) -> nn::Embedding {
    nn::embedding(path / "table", 10, 4, nn::EmbeddingConfig::default())
}

pub(crate) fn an_embedding_of_integer_tokens(name: &str) {
    check(name, table, |rollout, table, run| {
        let rows = rollout.block("embed", &[("tokens", &run.input("tokens"))], |_, x| table.forward(&x[0]))?;
        run.output("rows", &rows);
        Ok(())
    });
}

pub(crate) fn a_classifier_with_integer_targets(name: &str) {
    let build = |path: &nn::Path<'_>| linear(path, "linear", 6, 4);
    check(name, build, |rollout, layer, run| {
        let inputs = [("x", &run.leaf("x")), ("targets", &run.input("targets"))];
        let loss = rollout.block("classify", &inputs, |_, i| {
            layer.forward(&i[0]).cross_entropy_loss(&i[1], None::<Tensor>, Reduction::Mean, -100, 0.0)
        })?;
        run.output("loss", &loss);
        Ok(())
    });
}

pub(crate) fn a_weight_used_four_times_in_each_block(name: &str) {
    let build = |path: &nn::Path<'_>| linear(path, "linear", 6, 6);
    check(name, build, |rollout, layer, run| {
        let mut state = run.leaf("state");
        for _ in 0..2 {
            state = rollout.block("step", &[("state", &state)], |_, x| {
                (0..4).fold(x[0].shallow_clone(), |state, _| layer.forward(&state).tanh())
            })?;
        }
        run.output("state", &state);
        Ok(())
    });
}

pub(crate) fn weights_tied_inside_a_block(name: &str) {
    check(name, table, |rollout, table, run| {
        let scores = rollout.block("scores", &[("tokens", &run.input("tokens"))], |_, x| {
            table.forward(&x[0]).tanh().linear(&table.ws, None::<Tensor>)
        })?;
        run.output("scores", &scores);
        Ok(())
    });
}

/// Two layers with one weight.
struct Tied {
    first: nn::Linear,
    second: nn::Linear,
}

impl Tied {
    fn new(path: &nn::Path<'_>) -> Self {
        let first = linear(path, "first", 6, 6);
        let second = nn::Linear { ws: first.ws.shallow_clone(), bs: Some((path / "second").zeros("bias", &[6])) };
        Self { first, second }
    }

    #[replay_block]
    fn encode(&self, x: &Tensor) -> Tensor {
        self.first.forward(x).tanh()
    }

    #[replay_block]
    fn decode(&self, x: &Tensor) -> Tensor {
        self.second.forward(x).sigmoid()
    }
}

pub(crate) fn weights_tied_between_two_blocks(name: &str) {
    check(name, Tied::new, |rollout, model, run| {
        let hidden = model.encode_replay(rollout, &run.leaf("x"))?;
        run.output("y", &model.decode_replay(rollout, &hidden)?);
        Ok(())
    });
}
