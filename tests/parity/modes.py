"""Configurations: what a replay must find as its forward did."""

from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn


def step_of(run, body=lambda m, state: m.linear(state).tanh()):
    """A module with one linear layer."""
    return run.module(body, linear=nn.Linear(6, 6))


def a_context_that_restores_what_blocks_read(run):
    step, state = step_of(run, lambda m, state: m.linear(state).tanh() * m.scale), run.leaf("state", 5, 6)

    @contextmanager
    def put(scale):
        step.scale, before = scale, step.scale
        yield
        step.scale = before

    for scale in (1.0, 2.0, -0.5):
        step.scale = scale
        state = run.block(step, state=state, context_fn=lambda: (nullcontext(), put(step.scale)))
    step.scale = 17.0
    run.output("state", state)


def dropout(run, blocks):
    step = step_of(run, lambda m, state: F.dropout(m.linear(state).tanh(), 0.4))
    state = run.leaf("state", 5, 6)
    run.seed()
    for _ in range(blocks):
        state = run.block(step, state=state)
    run.output("state", state)


def dropout_in_one_block(run):
    dropout(run, 1)


def dropout_in_five_blocks(run):
    dropout(run, 5)


def noise_of_several_kinds(run):
    """Few normal numbers are drawn in pairs, of which the generator keeps the second one for later."""

    def body(m, state):
        state = m.linear(state).tanh() * torch.randn(1, dtype=state.dtype)
        return state * torch.rand(6, dtype=state.dtype) + torch.randint(0, 3, (5, 1)) * state.sin()

    run.dtype = torch.float64
    step, state = step_of(run, body), run.leaf("state", 5, 6)
    run.seed()
    for _ in range(3):
        state = run.block(step, state=state)
    run.output("state", state)


def numbers_drawn_between_blocks(run):
    step = step_of(run, lambda m, state: F.dropout(m.linear(state), 0.4).tanh())
    state = run.leaf("state", 5, 6)
    run.seed()
    for _ in range(3):
        state = run.block(step, state=state) * torch.rand(6)
    run.output("state", state)


def blocks_with_dropout_inside_blocks(run):
    inner = step_of(run, lambda m, state: F.dropout(m.linear(state), 0.4).tanh())
    outer = run.module(lambda m, state: run.replay(m.inner, {}, state=F.dropout(state, 0.2)), inner=inner)
    state = run.leaf("state", 5, 6)
    run.seed()
    for _ in range(2):
        state = run.block(outer, state=state)
    run.output("state", state)


def autocast_around_three_blocks(run):
    step, state = step_of(run), run.leaf("state", 5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            state = run.block(step, state=state)
    run.output("state", state)


def autocast_around_one_block_of_three(run):
    step, state = step_of(run), run.leaf("state", 5, 6)
    state = run.block(step, state=state)
    with torch.autocast("cpu", torch.bfloat16):
        state = run.block(step, state=state)
    run.output("middle", state)
    run.output("state", run.block(step, state=state.float()))


CONFIGURATIONS = [
    a_context_that_restores_what_blocks_read,
    dropout_in_one_block,
    dropout_in_five_blocks,
    noise_of_several_kinds,
    numbers_drawn_between_blocks,
    blocks_with_dropout_inside_blocks,
    autocast_around_three_blocks,
    autocast_around_one_block_of_three,
]
