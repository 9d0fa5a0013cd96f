"""Configurations: what blocks are made of."""

import torch
import torch.nn.functional as F
from torch import nn


def a_gru_cell_over_four_steps(run):
    cell = run.module(lambda m, x, state: m.cell(x, state), cell=nn.GRUCell(3, 4))
    state = run.leaf("state", 2, 4)
    for i in range(4):
        state = run.block(cell, x=run.leaf(f"x{i}", 2, 3), state=state)
    run.output("state", state)


def an_lstm_layer(run):
    def body(m, x, h, c):
        y, (h, c) = m.lstm(x, (h, c))
        return y, h, c

    layer = run.module(body, lstm=nn.LSTM(3, 4, batch_first=True))
    h, c = run.leaf("h", 1, 2, 4), run.leaf("c", 1, 2, 4)
    for i in range(2):
        y, h, c = run.block(layer, x=run.leaf(f"x{i}", 2, 5, 3), h=h, c=c)
        run.output(f"y{i}", y)
    run.output("c", c)


def convolutions(run):
    def body(m, image):
        return image + m.second(F.gelu(m.norm(m.first(image))))

    layers = {"first": nn.Conv2d(2, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4), "second": nn.Conv2d(4, 2, 1)}
    residual = run.module(body, **layers)
    image = run.leaf("image", 2, 2, 5, 5)
    for _ in range(2):
        image = run.block(residual, image=image)
    run.output("image", image)


def a_strided_convolution_in_f64(run):
    run.dtype = torch.float64
    conv = run.module(lambda m, x: m.conv(x).tanh(), conv=nn.Conv1d(2, 3, 3, stride=2))
    run.output("y", run.block(conv, x=run.leaf("x", 2, 2, 9)))


def attention(run, causal=False, **mask):
    """Two residual self-attentions. ``mask`` is a further input of the block, or nothing."""

    def body(m, x, mask=None):
        q, k, v = (part.view(2, 4, 2, 3).transpose(1, 2) for part in m.qkv(m.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return x + m.out(mixed.transpose(1, 2).reshape(2, 4, 6))

    block = run.module(body, norm=nn.LayerNorm(6), qkv=nn.Linear(6, 18), out=nn.Linear(6, 6))
    x = run.leaf("x", 2, 4, 6)
    for _ in range(2):
        x = run.block(block, x=x, **mask)
    run.output("x", x)


def self_attention(run):
    attention(run)


def causal_attention_in_f64(run):
    run.dtype = torch.float64
    attention(run, causal=True)


def attention_with_a_boolean_mask(run):
    mask = torch.tensor([[i + j != 4 for j in range(4)] for i in range(4)])
    attention(run, mask=run.input("mask", mask))


def attention_with_a_trained_bias(run):
    attention(run, mask=run.leaf("mask", 4, 4))


def attention_under_autocast(run):
    with torch.autocast("cpu", torch.bfloat16):
        attention(run)


def layer_norm_and_a_wide_layer(run):
    def body(m, x):
        return x + m.down(F.silu(m.up(m.norm(x))))

    block = run.module(body, norm=nn.LayerNorm(6), up=nn.Linear(6, 12), down=nn.Linear(12, 6))
    x = run.leaf("x", 3, 6)
    for _ in range(3):
        x = run.block(block, x=x)
    run.output("x", x)


def batch_norm_in_eval_mode(run):
    step = run.module(lambda m, x: m.norm(m.linear(x)), linear=nn.Linear(6, 4), norm=nn.BatchNorm1d(4)).eval()
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))


def an_embedding_of_integer_tokens(run):
    embed = run.module(lambda m, tokens: m.table(tokens), table=nn.Embedding(10, 4))
    tokens = run.input("tokens", torch.tensor([[1, 3, 3], [9, 0, 3]]))
    run.output("rows", run.block(embed, tokens=tokens))


def a_classifier_with_integer_targets(run):
    def body(m, x, targets):
        return F.cross_entropy(m.linear(x), targets)

    classifier = run.module(body, linear=nn.Linear(6, 4))
    targets = run.input("targets", torch.tensor([0, 3, 1, 1, 2]))
    run.output("loss", run.block(classifier, x=run.leaf("x", 5, 6), targets=targets))


def a_weight_used_four_times_in_each_block(run):
    def body(m, state):
        for _ in range(4):
            state = m.linear(state).tanh()
        return state

    run.dtype = torch.float64
    step, state = run.module(body, linear=nn.Linear(6, 6)), run.leaf("state", 5, 6)
    for _ in range(2):
        state = run.block(step, state=state)
    run.output("state", state)


def weights_tied_inside_a_block(run):
    table = nn.Embedding(10, 4)
    layers = {"table": table, "head": nn.Linear(4, 10, bias=False)}
    layers["head"].weight = table.weight
    model = run.module(lambda m, tokens: m.head(m.table(tokens).tanh()), **layers)
    tokens = run.input("tokens", torch.tensor([1, 3, 3, 9]))
    run.output("scores", run.block(model, tokens=tokens))


def weights_tied_between_two_blocks(run):
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    encode = run.module(lambda m, x: m.first(x).tanh(), first=first)
    decode = run.module(lambda m, x: m.second(x).sigmoid(), second=second)
    hidden = run.block(encode, x=run.leaf("x", 5, 6))
    run.output("y", run.block(decode, x=hidden))


CONFIGURATIONS = [
    a_gru_cell_over_four_steps,
    an_lstm_layer,
    convolutions,
    a_strided_convolution_in_f64,
    self_attention,
    causal_attention_in_f64,
    attention_with_a_boolean_mask,
    attention_with_a_trained_bias,
    attention_under_autocast,
    layer_norm_and_a_wide_layer,
    batch_norm_in_eval_mode,
    an_embedding_of_integer_tokens,
    a_classifier_with_integer_targets,
    a_weight_used_four_times_in_each_block,
    weights_tied_inside_a_block,
    weights_tied_between_two_blocks,
]
