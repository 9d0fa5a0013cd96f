"""Configurations on which the reference and plain autograd disagree, or which the reference lets pass.

Both run, and both results are written. The name says what holds in Rust.
"""

from contextlib import nullcontext, suppress

import torch
import torch.nn.functional as F
from torch import nn


class Failure(Exception):
    """What fails on purpose here."""


class Closed(nullcontext):
    """A context that cannot be entered."""

    def __enter__(self):
        raise Failure


def step_of(run, body=lambda m, x: m.linear(x).tanh()):
    """A module with one linear layer."""
    return run.module(body, linear=nn.Linear(6, 6))


def in_turn(*bodies):
    """A body that is another one each time it runs. Plain code runs only the first."""
    bodies = iter(bodies)
    return lambda m, x: next(bodies)(m, x)


def old_gradients_are_added_to(run):
    """The reference clears them, those of parameters that get no new gradient too."""
    step = run.module(lambda m, x: m.linear(x).tanh(), linear=nn.Linear(6, 6), idle=nn.Linear(6, 6))
    run.old_gradient("linear.weight")
    run.old_gradient("idle.weight")
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))


def a_detached_output_does_not_require_grad(run):
    """The reference's does, with the right gradients."""
    pair = step_of(run, lambda m, x: (m.linear(x).tanh().detach(), m.linear(x).sin()))
    constant, y = run.block(pair, x=run.leaf("x", 5, 6))
    run.output("constant", constant, used=False)
    run.output("product", constant * y)


def where_nothing_is_trained_no_output_requires_grad(run):
    """The reference's does, and its backward pass does nothing."""
    step = step_of(run).requires_grad_(False)
    run.output("y", run.block(step, x=run.input("x", run.normal(5, 6))))


def parameters_may_be_used_outside_of_blocks_too(run):
    """The reference clears what the use outside has contributed."""
    step = step_of(run)
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))
    run.output("weight", step.linear.weight.square())


def blocks_inside_blocks_share_the_sums(run):
    """With one dictionary for all of them, the reference adds earlier sums twice."""
    inner = step_of(run)
    outer = run.module(lambda m, x: run.block(inner, x=m.outer(x)), outer=nn.Linear(6, 6), inner=inner)
    state = run.leaf("x", 5, 6)
    for _ in range(2):
        state = run.block(outer, x=state)
    run.output("state", state)


def a_region_without_autocast_is_differentiated_without_it(run):
    """The reference differentiates it under the autocast that is around the block, in the smaller type."""

    def body(m, x):
        with torch.autocast("cpu", enabled=False):
            return m.linear(x).tanh()

    step = step_of(run, body)
    with torch.autocast("cpu", torch.bfloat16):
        y = run.block(step, x=run.leaf("x", 5, 6))
    run.output("y", y)


def a_tensor_with_a_history_must_be_an_input(run):
    """The reference differentiates its history with each block, the second time in vain."""
    scale = run.leaf("scale", 6).exp()
    step, state = step_of(run, lambda m, x: m.linear(x).tanh() * scale), run.leaf("x", 5, 6)
    for _ in range(2):
        state = run.block(step, x=state)
    run.output("state", state)
    with suppress(RuntimeError):
        run.backward()


def an_input_that_was_changed_is_an_error(run):
    """The reference replays with the changed values."""
    x = run.input("x", run.normal(5, 6))
    run.output("y", run.block(step_of(run), x=x))
    if run.reference:
        x.add_(1.0)


def a_parameter_that_was_changed_is_an_error(run):
    """The reference replays with the changed values."""
    step = step_of(run)
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))
    if run.reference:
        with torch.no_grad():
            step.linear.weight.mul_(1.5)


def a_parameter_that_was_frozen_is_an_error(run):
    """The reference leaves it without gradient."""
    step = step_of(run)
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))
    if run.reference:
        step.linear.weight.requires_grad_(False)


def a_block_that_changes_its_input_is_an_error(run):
    """The reference changes it in both passes."""
    step = step_of(run, lambda m, x: m.linear(x.mul_(2.0) if run.reference else x * 2.0).tanh())
    run.output("y", run.block(step, x=run.input("x", run.normal(5, 6))))


def a_block_that_updates_statistics_is_an_error(run):
    """The reference updates them in both passes."""
    step = run.module(lambda m, x: m.norm(x).tanh(), norm=nn.BatchNorm1d(6))
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))
    run.backward()
    run.output("running_mean", step.norm.running_mean, used=False)
    run.output("running_var", step.norm.running_var, used=False)


def a_replay_that_draws_other_numbers_is_an_error(run):
    """The reference's gradient belongs to another mask."""

    def masked(m, x):
        return F.dropout(m.linear(x), 0.5)

    step = step_of(run, in_turn(masked, lambda m, x: masked(m, x + 0.0 * torch.rand(1))))
    x = run.leaf("x", 5, 6)
    run.seed()
    run.output("y", run.block(step, x=x))


def a_replay_that_detaches_an_output_is_an_error(run):
    """The reference goes on without its gradient."""

    def pair(m, x):
        return m.linear(x).tanh(), x.sin()

    def half(m, x):
        return m.linear(x).tanh(), x.sin().detach()

    a, b = run.block(step_of(run, in_turn(pair, half)), x=run.leaf("x", 5, 6))
    run.output("a", a)
    run.output("b", b)


def failing(m, x):
    """A body that fails."""
    raise Failure


def a_failed_replay_gives_old_gradients_back(run):
    """The reference has cleared them by then."""
    step = step_of(run, in_turn(lambda m, x: m.linear(x).tanh(), failing))
    run.old_gradient("linear.weight")
    run.output("y", run.block(step, x=run.leaf("x", 5, 6)))
    with suppress(Failure):
        run.backward()


def a_context_that_fails_names_its_block_and_gives_old_gradients_back(run):
    """The reference hands its error on, and has cleared the gradients by then."""
    step = step_of(run)
    run.old_gradient("linear.weight")
    run.output("y", run.block(step, x=run.leaf("x", 5, 6), context_fn=lambda: (nullcontext(), Closed())))
    with suppress(Failure):
        run.backward()


def a_second_backward_pass_is_an_error(run):
    """The reference adds the gradients of parameters once more."""
    run.output("y", run.block(step_of(run), x=run.leaf("x", 5, 6)))
    if run.reference:
        run.loss.backward(retain_graph=True)


def a_second_derivative_is_taken_inside_a_block(run):
    """The reference's gradient has no history, so that the second derivative is silently lost."""
    step, x = step_of(run), run.leaf("x", 5, 6)
    (gradient,) = torch.autograd.grad(run.block(step, x=x).sum(), x, create_graph=True)
    run.output("gradient", gradient)


CONFIGURATIONS = [
    old_gradients_are_added_to,
    a_detached_output_does_not_require_grad,
    where_nothing_is_trained_no_output_requires_grad,
    parameters_may_be_used_outside_of_blocks_too,
    blocks_inside_blocks_share_the_sums,
    a_region_without_autocast_is_differentiated_without_it,
    a_tensor_with_a_history_must_be_an_input,
    an_input_that_was_changed_is_an_error,
    a_parameter_that_was_changed_is_an_error,
    a_parameter_that_was_frozen_is_an_error,
    a_block_that_changes_its_input_is_an_error,
    a_block_that_updates_statistics_is_an_error,
    a_replay_that_draws_other_numbers_is_an_error,
    a_replay_that_detaches_an_output_is_an_error,
    a_failed_replay_gives_old_gradients_back,
    a_context_that_fails_names_its_block_and_gives_old_gradients_back,
    a_second_backward_pass_is_an_error,
    a_second_derivative_is_taken_inside_a_block,
]
