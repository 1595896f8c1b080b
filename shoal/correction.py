"""What may be done to an update because worker groups run beside each other; everything is off by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import Cluster
from shoal.errors import UsageError
from shoal.updater import Settings
from shoal.wire import OptimizerSpec

FIXED_RATE = frozenset({"torch.optim:Rprop", "torch.optim:ASGD", "torch.optim:Adafactor"})
"""Classes that do not move by `lr` times a direction at each update."""


@dataclass(frozen=True)
class Correction:
    """The corrections of one run.

    Attributes:
        by_staleness: divide the rate by staleness + 1 (Zhang et al., 2016).
        compensation: λ of g + λ · g ⊙ g ⊙ (now − then), the delay compensation of Zheng et al. (2017).
        groups: divide the rate by this number.
    """

    by_staleness: bool = False
    compensation: float = 0.0
    groups: int = 1

    @classmethod
    def of(cls, cluster: Cluster) -> Correction:
        """The corrections that a cluster block asks for; groups that never exchange anything share no rate."""
        mean = cluster.group_scale == "mean" and cluster.nserver_groups > 0
        groups = cluster.nworker_groups if mean else 1
        return cls(cluster.staleness_rate, cluster.delay_compensation, groups)

    def settings(self, settings: Settings, staleness: int) -> Settings:
        """The hyperparameters of one update; `staleness` in versions."""
        divisor = self.groups * (max(staleness, 0) + 1 if self.by_staleness else 1)
        if divisor == 1:
            return settings
        return tuple({**group, "lr": group["lr"] / divisor} for group in settings)

    def gradient(self, gradient: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """The gradient (flat) moved from the values it was computed on, `then`, to the present ones, `now`."""
        if not self.compensation:
            return gradient
        moved = now.to(gradient.dtype) - then.to(gradient.dtype)
        if gradient.is_complex():
            parts = self.gradient(*map(torch.view_as_real, (gradient, moved, torch.zeros_like(moved))))
            return torch.view_as_complex(parts)
        return torch.addcmul(gradient, gradient.square(), moved, value=self.compensation)

    def refuse(self, optimizers: Sequence[OptimizerSpec]) -> None:
        """Raises UsageError for an optimizer whose rate cannot be divided, where that is asked for."""
        if not self.by_staleness and self.groups == 1:
            return
        setting = "staleness_rate" if self.by_staleness else "group_scale: mean"
        for spec in optimizers:
            if spec.name in FIXED_RATE or not all("lr" in group for group in spec.groups):
                raise UsageError(
                    f"cluster.{setting} divides lr, and {spec.name} does not move by lr at each update",
                    remedy="use another optimizer, Adam for instance, or leave the setting out",
                )
