"""Configurations: how many blocks, what they hand on, and what runs between them."""

import torch
from torch import nn


def step_of(run, body=lambda m, state: m.linear(state).tanh()):
    """A module with one linear layer."""
    return run.module(body, linear=nn.Linear(6, 6))


def chain(run, blocks):
    """Each block reads the state that the one before it has left, and each state is part of the loss."""
    step, state = step_of(run), run.leaf("state", 5, 6)
    for i in range(blocks):
        state = run.block(step, state=state)
        run.output(f"state{i}", state)


def one_block(run):
    chain(run, 1)


def a_chain_of_two_blocks(run):
    chain(run, 2)


def a_chain_of_three_blocks_in_f64(run):
    run.dtype = torch.float64
    chain(run, 3)


def a_chain_of_four_blocks(run):
    chain(run, 4)


def a_chain_of_five_blocks(run):
    chain(run, 5)


def a_chain_of_five_blocks_in_f64(run):
    run.dtype = torch.float64
    chain(run, 5)


def two_outputs(run):
    def body(m, state, action):
        hidden = m.first(state) + action
        return hidden.tanh(), m.second(hidden).sigmoid()

    world = run.module(body, first=nn.Linear(6, 6), second=nn.Linear(6, 2))
    state, action = run.leaf("state", 5, 6), run.leaf("action", 5, 6)
    for i in range(2):
        state, reward = run.block(world, state=state, action=action)
        run.output(f"reward{i}", reward)
    run.output("state", state)


def one_output_of_three_is_unused(run):
    def body(m, x):
        hidden = m.first(x)
        return hidden.tanh(), m.second(hidden), hidden.exp()

    pair = run.module(body, first=nn.Linear(6, 6), second=nn.Linear(6, 6))
    a, b, c = run.block(pair, x=run.leaf("x", 5, 6))
    run.output("a", a)
    run.output("b", b, used=False)
    run.output("c", c)


def an_output_read_by_two_blocks(run):
    step = step_of(run)
    trunk = run.block(step, state=run.leaf("state", 5, 6))
    run.output("left", run.block(step, state=trunk))
    run.output("right", run.block(step, state=trunk.cos()))
    run.output("trunk", trunk)


def metadata_that_differs_from_block_to_block(run):
    def body(m, state, scale, power, activation):
        state = m.linear(state) * scale
        return (state.tanh() if activation == "tanh" else state.sigmoid()) ** power

    step, state = step_of(run, body), run.leaf("state", 5, 6)
    for scale, power, activation in ((0.5, 1, "tanh"), (1.25, 2, "sigmoid"), (-0.75, 3, "tanh")):
        state = run.block(step, state=state, scale=scale, power=power, activation=activation)
    run.output("state", state)


def blocks_inside_blocks(run):
    """The reference needs another dictionary for the inner blocks of each outer one."""

    def body(m, state):
        accumulated = {}
        state = run.replay(m.inner, accumulated, state=m.outer(state))
        return run.replay(m.inner, accumulated, state=state).sin()

    outer = run.module(body, inner=step_of(run), outer=nn.Linear(6, 6))
    state = run.leaf("state", 5, 6)
    for _ in range(2):
        state = run.block(outer, state=state)
    run.output("state", state)


def gradients_of_three_backward_passes(run):
    """The reference adds them up if all passes share one dictionary."""
    step, state = step_of(run), run.leaf("state", 5, 6)
    for i in range(3):
        once = run.block(step, state=state * (i + 1))
        run.output(f"state{i}", run.block(step, state=once))
        run.backward()


def plain_code_between_blocks(run):
    step, state = step_of(run), run.leaf("state", 5, 6).sin()
    for _ in range(3):
        state = run.block(step, state=state)
        state = state / (state.detach().abs().mean() + 1.0)
    run.output("state", state.exp())


def a_state_detached_between_blocks(run):
    step, state = step_of(run), run.leaf("state", 5, 6)
    for i in range(3):
        state = run.block(step, state=state.detach())
        run.output(f"state{i}", state)


def three_models_in_one_rollout(run):
    encoder = run.module(lambda m, image: m.encode(image).tanh(), encode=nn.Linear(8, 6))
    step = run.module(lambda m, state: state + m.step(state).tanh(), step=nn.Linear(6, 6))
    decoder = run.module(lambda m, state: m.decode(state), decode=nn.Linear(6, 8))
    state = run.block(encoder, image=run.leaf("image", 5, 8))
    for i in range(2):
        state = run.block(step, state=state)
        run.output(f"image{i}", run.block(decoder, state=state))


CONFIGURATIONS = [
    one_block,
    a_chain_of_two_blocks,
    a_chain_of_three_blocks_in_f64,
    a_chain_of_four_blocks,
    a_chain_of_five_blocks,
    a_chain_of_five_blocks_in_f64,
    two_outputs,
    one_output_of_three_is_unused,
    an_output_read_by_two_blocks,
    metadata_that_differs_from_block_to_block,
    blocks_inside_blocks,
    gradients_of_three_backward_passes,
    plain_code_between_blocks,
    a_state_detached_between_blocks,
    three_models_in_one_rollout,
]
