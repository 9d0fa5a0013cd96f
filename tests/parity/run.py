"""What the configurations are written with: a module made of a function, and a run that notes what went in and out."""

import torch
from torch import nn

SEED = 20
"""The seed of everything random: the values that are given, and the default generator where a block draws from it."""


class Module(nn.Module):
    """A module whose forward is a function of its layers and inputs."""

    def __init__(self, body, layers):
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, **inputs):
        return self.body(self, **inputs)


class Run:
    """One configuration under way. Its blocks run by the reference, or, where there is none, as plain code."""

    def __init__(self, reference=None):
        self.reference = reference
        self.dtype = torch.float32
        self.accumulated = {}
        self.given = {}
        self.results = {}
        self.variables = {}
        self.leaves = {}
        self.loss = None
        self.losses = []
        self._generator = torch.Generator().manual_seed(SEED)

    def normal(self, *size):
        """Normal random numbers that do not come from the default generator."""
        return torch.randn(size, generator=self._generator, dtype=torch.float64).to(self.dtype)

    def positive(self, *size):
        """Random numbers of at least one half."""
        return self.normal(*size).abs() + 0.5

    def module(self, body, **layers):
        """A module with random parameters, and random positive buffers. ``body`` takes it and the inputs."""
        module = Module(body, layers).to(self.dtype)
        for name, parameter in module.named_parameters():
            if not any(parameter is known for known in self.variables.values()):
                parameter.data = self.normal(*parameter.shape) / 2
                self._variable(name, parameter)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(self.positive(*buffer.shape))
                self._variable(name, buffer)
        return module

    def _variable(self, name, tensor):
        assert name not in self.variables, f"two variables are called {name}"
        self.variables[name] = tensor
        self.given[f"variable.{name}"] = tensor.detach().clone()

    def old_gradient(self, name):
        """Gives a parameter a gradient from before."""
        parameter = self.variables[name]
        parameter.grad = self.normal(*parameter.shape)
        self.given[f"old.{name}"] = parameter.grad.clone()

    def input(self, name, values):
        """An input that gets no gradient."""
        self.given[f"input.{name}"] = values.detach().clone()
        return values

    def leaf(self, name, *size):
        """A random input that gets a gradient."""
        self.leaves[name] = self.input(name, self.normal(*size)).requires_grad_()
        return self.leaves[name]

    def seed(self):
        """Seeds the default generator, from which blocks draw."""
        self.given["seed"] = torch.tensor(SEED)
        torch.manual_seed(SEED)

    def block(self, module, **inputs):
        """Runs ``module`` as a block of the rollout."""
        return self.replay(module, self.accumulated, **inputs)

    def replay(self, module, accumulated, context_fn=None, **inputs):
        """Runs ``module`` as a block that shares ``accumulated`` with others."""
        if self.reference is None:
            return module(**inputs)
        return self.reference(module, accumulated, context_fn=context_fn, **inputs)

    def output(self, name, tensor, used=True):
        """Notes an output. If it is used, its squares, weighted at random, are part of the loss."""
        self.results[f"output.{name}"] = tensor.detach().clone()
        self.results[f"requires_grad.{name}"] = torch.tensor(tensor.requires_grad)
        if used:
            weight = self.positive(*tensor.shape)
            self.given[f"weight.{name}"] = weight
            part = (tensor.square() * weight).sum()
            self.loss = part if self.loss is None else self.loss + part

    def backward(self):
        """Differentiates the sum of the outputs that were noted since the last time, if that has a gradient."""
        loss, self.loss = self.loss, None
        if loss is not None:
            self.losses.append(loss.detach())
            if loss.requires_grad:
                loss.backward()

    def finish(self):
        """Differentiates what is left and notes the gradients. One that never arrived is not noted."""
        self.backward()
        self.results["loss"] = torch.stack(self.losses)
        for kind, tensors in (("variable", self.variables), ("input", self.leaves)):
            for name, tensor in tensors.items():
                if tensor.grad is not None:
                    self.results[f"grad.{kind}.{name}"] = tensor.grad
