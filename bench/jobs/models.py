"""The models that are trained, computation as a calibrated wait, and gradients without any computation."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Shape(NamedTuple):
    """The widths of a network of linear layers, inputs first."""

    widths: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """Numbers per sample."""
        return self.widths[0]

    @property
    def outputs(self) -> int:
        """Classes."""
        return self.widths[-1]

    @property
    def parameters(self) -> int:
        """Elements of all weights and biases."""
        return sum((i + 1) * o for i, o in zip(self.widths, self.widths[1:], strict=False))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, which are float32."""
        return 4 * self.parameters


SHAPES = {
    "digits": Shape((64, 128, 10)),
    "mnist": Shape((784, 256, 10)),  # 203,530 parameters
    "lan": Shape((512,) * 11),  # 10.5 MB
    "ten": Shape((1000,) * 11),  # 10 million parameters
    "giga": Shape((4096,) * 16),  # 1 GB
}


def shape_of(name: str) -> Shape:
    """The shape of a model by name."""
    return SHAPES[name]


class Pause(torch.autograd.Function):
    """A layer's place: its gradients are ones, and what computing would take is waited for.

    Members of one machine would fight for its few cores; so each waits as for a device of its own.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, seconds: float) -> Tensor:
        """A third of the time is the forward's; the output (batch × outputs) is zeros."""
        ctx.save_for_backward(inputs, weight, bias)
        ctx.seconds = seconds
        pause(seconds / 3)
        return inputs.new_zeros(len(inputs), len(bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Two thirds are the backward's."""
        pause(ctx.seconds * 2 / 3)
        inputs, weight, bias = ctx.saved_tensors
        return torch.zeros_like(inputs), torch.ones_like(weight), torch.ones_like(bias), None


def calibrated() -> float:
    """Seconds by which a sleep is too long on this machine: the median of some.

    Sleeping is what stands in for computing here; nothing is synchronised by it.
    """
    late = []
    for _ in range(21):
        began = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    return sorted(late)[len(late) // 2]


LATE = calibrated()


def pause(seconds: float) -> None:
    """Wait, less what a sleep is usually too long."""
    if seconds > LATE:
        time.sleep(seconds - LATE)


class Waiting(nn.Linear):
    """A linear layer that waits some seconds, forward and backward together, and computes nothing."""

    def __init__(self, inputs: int, outputs: int, seconds: float) -> None:
        super().__init__(inputs, outputs)
        self.seconds = seconds

    def forward(self, input: Tensor) -> Tensor:
        """Zeros, later."""
        found: Tensor = Pause.apply(input, self.weight, self.bias, self.seconds)  # type: ignore[no-untyped-call]
        return found


def make_model(shape: Shape, seconds: float | None = None) -> nn.Module:
    """Linear layers with ReLU between them; or layers that wait ``seconds`` in all instead of computing."""
    pairs = list(zip(shape.widths, shape.widths[1:], strict=False))
    if seconds is not None:
        return nn.Sequential(*(Waiting(*pair, seconds / len(pairs)) for pair in pairs))
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def give(model: nn.Module) -> None:
    """Give every parameter a gradient of ones, for steps without any computation."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
