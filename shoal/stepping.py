"""What every optimizer's step has in common, whoever takes it."""

from __future__ import annotations

import cmath
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.batch import Batch
from shoal.errors import NonFiniteGradients

CLIP_LAST = (
    "clip with run.clip_grad_norm_(max_norm), the last thing before optimizer.step(); p.grad is this "
    "worker's own gradient, and it leaves during backward"
)

SKIPS = 100
"""Rounds in a row that may be skipped for infinite or missing numbers."""


class Loop(Protocol):
    """What an optimizer's step needs of the training loop around it.

    Attributes:
        stop_asked: this worker wants all groups to end their loops.
        stopping: the group is to end its loop after this step.
    """

    batch: Batch
    stop_asked: bool
    stopping: bool

    def cursor(self) -> tuple[int, ...]:
        """The loaders' positions, for the commit."""
        ...

    def note(self, message: str) -> None:
        """Tell the user something, once."""
        ...

    def stepped(self) -> None:
        """An optimizer's step is over."""
        ...


class Skips:
    """Counts the steps in a row that an optimizer's group has skipped, and tells those who have to know."""

    def __init__(self, optimizer: torch.optim.Optimizer, member: str, loop: Loop) -> None:
        self._optimizer, self._member, self._loop = optimizer, member, loop
        self._in_a_row = 0

    def judge(self, skipped: bool, step: int, scaler: Any) -> None:
        """The group has skipped a step, or not; a GradScaler is told what the group found."""
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if scaler is not None:
            found = torch.full((), float(skipped), device=scaler._scale.device)
            scaler._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"] = {found.device: found}
        if skipped and scaler is None:
            self._loop.note("a gradient was not finite; the group skips such steps and counts them")
        if self._in_a_row >= SKIPS:
            raise NonFiniteGradients(
                f"the last {SKIPS} steps of the group were skipped, because a gradient was not finite",
                member=self._member,
                step=step,
                remedy="lower the learning rate, clip with run.clip_grad_norm_, or look for log(0) and 0/0",
            )


def loss_scale(scaler: Any, optimizer: torch.optim.Optimizer) -> float:
    """The factor that the gradients still carry."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return 1.0 if stage.name == "UNSCALED" else float(scaler.get_scale())


def finite(values: Tensor) -> bool:
    """Whether all values are finite; the sum is the cheap test, and right unless it overflows."""
    if not (values.is_floating_point() or values.is_complex()):
        return True
    if cmath.isfinite(values.sum().item()):
        return True
    return bool(values.isfinite().all())
