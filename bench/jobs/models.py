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


class Wait(torch.autograd.Function):
    """Takes time in forward and in backward, as a device of its own would, and no processor.

    It stands in for computing: members of one machine would fight for its few cores.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        """A third of the time is the forward's."""
        ctx.seconds = seconds
        pause(seconds / 3)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Two thirds are the backward's."""
        pause(ctx.seconds * 2 / 3)
        return gradient, None


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


class Computing(nn.Module):
    """A layer that takes some seconds for forward and backward together."""

    def __init__(self, layer: nn.Module, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = layer, seconds

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output, later."""
        output: Tensor = Wait.apply(self.layer(inputs), self.seconds)  # type: ignore[no-untyped-call]
        return output


def make_model(shape: Shape, compute: float = 0.0) -> nn.Module:
    """Linear layers with ReLU between them; a forward and backward waits ``compute`` seconds in all."""
    layers: list[nn.Module] = []
    pairs = list(zip(shape.widths, shape.widths[1:], strict=False))
    for inputs, outputs in pairs:
        layer: nn.Module = nn.Linear(inputs, outputs)
        layers += [Computing(layer, compute / len(pairs)) if compute else layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def give(model: nn.Module) -> None:
    """Give every parameter a gradient of ones, for steps without any computation."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
