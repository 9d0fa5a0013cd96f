//! A decoder that predicts the next token.

use replay_runtime::{ReplayError, Rollout, Sharded, dist::Dist, replay_block};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

/// Its sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) layers: usize,
    pub(crate) width: i64,
    pub(crate) heads: i64,
    pub(crate) tokens: i64,
    pub(crate) length: i64,
}

/// A layer with causal attention: one unit.
#[derive(Debug)]
pub(crate) struct Layer {
    norms: [nn::LayerNorm; 2],
    attend: [nn::Linear; 2],
    expand: [nn::Linear; 2],
    heads: i64,
}

impl Layer {
    fn new(path: &nn::Path<'_>, size: Size) -> Self {
        let linear = |name: &str, from: i64, to: i64| nn::linear(path / name, from, to, nn::LinearConfig::default());
        let norm = |name: &str| nn::layer_norm(path / name, vec![size.width], nn::LayerNormConfig::default());
        Self {
            norms: ["norm1", "norm2"].map(norm),
            attend: [linear("qkv", size.width, 3 * size.width), linear("out", size.width, size.width)],
            expand: [linear("up", size.width, 4 * size.width), linear("down", 4 * size.width, size.width)],
            heads: size.heads,
        }
    }

    /// Several batches, each by itself: what one process is fed in place of several. From the last to the first, so that
    /// their gradients are added up from the first to the last.
    #[replay_block(early_stop)]
    fn forward(&self, batches: &Tensor) -> Tensor {
        let mut outputs: Vec<_> = batches.unbind(0).iter().rev().map(|x| self.apply(x)).collect();
        outputs.reverse();
        Tensor::stack(&outputs, 0)
    }

    /// From and to `[batch, length, width]`.
    fn apply(&self, x: &Tensor) -> Tensor {
        let [batch, length, width] = x.size()[..] else { unreachable!("three dimensions") };
        let heads = |part: Tensor| part.view([batch, length, self.heads, width / self.heads]).transpose(1, 2);
        let [q, k, v] = {
            let mut parts = self.attend[0].forward(&self.norms[0].forward(x)).chunk(3, -1).into_iter().map(heads);
            std::array::from_fn(|_| parts.next().expect("three parts"))
        };
        let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false);
        let x = x + self.attend[1].forward(&mixed.transpose(1, 2).reshape([batch, length, width]));
        let hidden = self.expand[0].forward(&self.norms[1].forward(&x)).gelu("none");
        x + self.expand[1].forward(&hidden)
    }
}

/// Embeddings and head belong to no unit: they are whole while a rollout lives.
#[derive(Debug)]
pub(crate) struct Decoder {
    embedding: nn::Embedding,
    positions: Tensor,
    layers: Vec<Layer>,
    head: nn::Linear,
}

impl Decoder {
    pub(crate) fn new(root: &nn::Path<'_>, size: Size) -> Self {
        let Size { layers, width, tokens, length, .. } = size;
        Self {
            embedding: nn::embedding(root / "embedding", tokens, width, nn::EmbeddingConfig::default()),
            positions: root.randn("positions", &[length, width], 0.0, 0.1),
            layers: (0..layers).map(|i| Layer::new(&(root / "layers" / i), size)).collect(),
            head: nn::linear(root / "head", width, tokens, nn::LinearConfig::default()),
        }
    }

    /// The layers are units.
    pub(crate) fn shard<'d>(
        &self,
        dist: &'d Dist,
        vs: &nn::VarStore,
    ) -> Result<Sharded<'d>, replay_runtime::ShardError> {
        let mut builder = Sharded::builder(dist, vs);
        for (i, layer) in self.layers.iter().enumerate() {
            builder = builder.unit(&format!("layers.{i}"), layer);
        }
        builder.build()
    }

    /// The loss of each batch of `[batches, batch, length + 1]` tokens.
    pub(crate) fn losses<'m>(&'m self, rollout: &Rollout<'m>, sequences: &Tensor) -> Result<Vec<Tensor>, ReplayError> {
        let length = sequences.size()[2] - 1;
        let (seen, next) = (sequences.narrow(2, 0, length), sequences.narrow(2, 1, length));
        let embed = |seen: &Tensor| self.embedding.forward(seen) + self.positions.narrow(0, 0, length);
        // As in the layers.
        let mut embedded: Vec<_> = seen.unbind(0).iter().rev().map(embed).collect();
        embedded.reverse();
        let mut x = Tensor::stack(&embedded, 0);
        for layer in &self.layers {
            x = layer.forward_replay(rollout, &x)?;
        }
        let (x, next) = (x.unbind(0), next.unbind(0));
        let loss = |(x, next): (&Tensor, &Tensor)| {
            self.head.forward(x).flatten(0, 1).cross_entropy_for_logits(&next.reshape(-1))
        };
        let mut losses: Vec<_> = x.iter().zip(&next).rev().map(loss).collect();
        losses.reverse();
        Ok(losses)
    }
}

/// Sequences `a + b i` modulo the number of tokens, which a model can learn: `[batch, length + 1]`.
pub(crate) fn batch(size: Size, batch: i64, seed: i64) -> Tensor {
    // Without the generator, which one process could not have in the state of several.
    let rows = Tensor::arange(batch, (Kind::Int64, tch::Device::Cpu)).unsqueeze(1) + seed * batch;
    let (start, step) = ((&rows * 7 + 3).remainder(size.tokens), (&rows * 5).remainder(3) + 1);
    (start + step * Tensor::arange(size.length + 1, (Kind::Int64, tch::Device::Cpu))).remainder(size.tokens)
}
