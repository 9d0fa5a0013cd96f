"""Configurations: what goes into a block and what comes out of it."""

import torch
from torch import nn


def layer_of(run, body, outputs=6):
    """A module with one linear layer."""
    return run.module(body, linear=nn.Linear(6, outputs))


def some_inputs_without_grad(run):
    step = layer_of(run, lambda m, x, y, z: m.linear(x * y).tanh() * z.exp())
    x, z = run.leaf("x", 5, 6), run.leaf("z", 5, 6)
    run.output("y", run.block(step, x=x, y=run.input("y", run.normal(5, 6)), z=z))


def parameters_alone_get_gradients(run):
    step, state = layer_of(run, lambda m, x: m.linear(x).tanh()), run.input("x", run.normal(5, 6))
    for _ in range(3):
        state = run.block(step, x=state)
    run.output("state", state)


def some_parameters_are_frozen(run):
    def body(m, x):
        return m.second(m.first(x).tanh())

    pair = run.module(body, first=nn.Linear(6, 6), second=nn.Linear(6, 6))
    pair.first.requires_grad_(False)
    pair.second.bias.requires_grad_(False)
    state = run.leaf("x", 5, 6)
    for _ in range(2):
        state = run.block(pair, x=state)
    run.output("state", state)


def all_parameters_are_frozen(run):
    step, state = layer_of(run, lambda m, x: m.linear(x).tanh()), run.leaf("x", 5, 6)
    step.requires_grad_(False)
    for _ in range(2):
        state = run.block(step, x=state)
    run.output("state", state)


def integer_and_boolean_inputs(run):
    def body(m, rows, x, keep):
        return m.linear(x)[rows].tanh() * keep

    step = layer_of(run, body)
    rows = run.input("rows", torch.tensor([4, 0, 0, 2]))
    keep = run.input("keep", torch.tensor([True, False, True, True, False, True]))
    run.output("y", run.block(step, rows=rows, x=run.leaf("x", 5, 6), keep=keep))


def the_same_tensor_as_two_inputs(run):
    both = layer_of(run, lambda m, a, b: m.linear(a).tanh() * b.cos())
    x = run.leaf("x", 5, 6)
    run.output("y", run.block(both, a=x, b=x))


def an_expanded_input(run):
    step = layer_of(run, lambda m, x: m.linear(x).tanh())
    wide = run.leaf("row", 6).expand(5, 6)
    run.output("y", run.block(step, x=wide))


def transposed_and_strided_inputs(run):
    step = layer_of(run, lambda m, x, y: m.linear(x).tanh() + y)
    x, y = run.leaf("x", 6, 5), run.leaf("y", 12)
    run.output("sum", run.block(step, x=x.t(), y=y[::2]))


def scalar_and_empty_inputs(run):
    def body(m, x, scale, none):
        return m.linear(torch.cat([x, none])) * scale

    step = layer_of(run, body)
    none = run.leaf("none", 0, 6)
    run.output("y", run.block(step, x=run.leaf("x", 5, 6), scale=run.leaf("scale"), none=none))


def inputs_of_two_kinds(run):
    step = layer_of(run, lambda m, x, y: (m.linear(x).double() * y).sin())
    x = run.leaf("x", 5, 6)
    run.dtype = torch.float64
    run.output("y", run.block(step, x=x, y=run.leaf("y", 6)))


def a_trained_tensor_that_blocks_capture(run):
    scale = run.leaf("scale", 6)
    step, state = layer_of(run, lambda m, x: m.linear(x).tanh() * scale), run.leaf("x", 5, 6)
    for _ in range(2):
        state = run.block(step, x=state)
    run.output("state", state)


def integer_and_boolean_outputs(run):
    def body(m, x):
        hidden = m.linear(x).tanh()
        return hidden.argmax(1), hidden > 0, hidden

    index, mask, hidden = run.block(layer_of(run, body), x=run.leaf("x", 5, 6))
    run.output("index", index, used=False)
    run.output("mask", mask, used=False)
    run.output("hidden", hidden)


def views_and_inputs_as_outputs(run):
    def body(m, x):
        left, right = m.linear(x).chunk(2, 1)
        return left, right, x, x.t()

    left, right, same, turned = run.block(layer_of(run, body), x=run.leaf("x", 5, 6))
    run.output("left", left)
    run.output("right", right)
    run.output("same", same)
    run.output("turned", turned)


def operations_in_place_inside_a_block(run):
    step = layer_of(run, lambda m, x: m.linear(x).mul_(2.0).tanh_())
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))


def an_output_changed_in_place_by_the_caller(run):
    step = layer_of(run, lambda m, x: m.linear(x).sin())
    y = run.block(step, x=run.leaf("x", 5, 6))
    run.output("y", y.mul_(3.0).add_(1.0))


CONFIGURATIONS = [
    some_inputs_without_grad,
    parameters_alone_get_gradients,
    some_parameters_are_frozen,
    all_parameters_are_frozen,
    integer_and_boolean_inputs,
    the_same_tensor_as_two_inputs,
    an_expanded_input,
    transposed_and_strided_inputs,
    scalar_and_empty_inputs,
    inputs_of_two_kinds,
    a_trained_tensor_that_blocks_capture,
    integer_and_boolean_outputs,
    views_and_inputs_as_outputs,
    operations_in_place_inside_a_block,
    an_output_changed_in_place_by_the_caller,
]
