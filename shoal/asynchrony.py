"""What worker groups beside each other do to an update: corrections, all off by default, and cautions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.config import Cluster
from shoal.errors import UsageError
from shoal.partition import Parameter
from shoal.topology import Topology
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
        """The corrections that a block asks for; independent groups keep their rates."""
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
        """The gradient (flat) as the values `now` would give it, guessed from the one that `then` gave."""
        if not self.compensation:
            return gradient
        moved = now.to(gradient.dtype) - then.to(gradient.dtype)
        if gradient.is_complex():
            parts = self.gradient(*map(torch.view_as_real, (gradient, moved, torch.zeros_like(moved))))
            return torch.view_as_complex(parts)
        return torch.addcmul(gradient, gradient, gradient * moved, value=self.compensation)

    def refuse_tables(self, parameters: Sequence[Parameter]) -> None:
        """Raises UsageError for a table where compensation is asked for: servers keep no copy of what was."""
        for parameter in parameters:
            if parameter.row and self.compensation:
                raise UsageError(
                    f"cluster.delay_compensation is not possible for {parameter.name}, which is sparse",
                    remedy="build its module with sparse=False, or leave the setting out",
                )

    def refuse(self, optimizers: Sequence[OptimizerSpec]) -> None:
        """Raises UsageError for an optimizer whose rate cannot be divided, where that is asked for."""
        if not self.by_staleness and self.groups == 1:
            return
        setting = "staleness_rate" if self.by_staleness else "group_scale: mean"
        for spec in optimizers:
            name = spec.name.partition(":")[2]
            if spec.name in FIXED_RATE or not all("lr" in group for group in spec.groups):
                raise UsageError(
                    f"cluster.{setting} divides lr, and {name} does not move by lr at each update",
                    remedy="use another optimizer, Adam for instance, or leave the setting out",
                )


def cautions(
    topology: Topology, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[str]:
    """Where training in several groups cannot be what it is in one, in words that name what it is about."""
    if topology.worker_groups == 1 or topology.framework == "independent":
        return
    kept = [n for model in models for n, m in model.named_modules() if _keeps_statistics(m)]
    if kept:
        how = "of groups on one server group those of the last round stay"
        if topology.synchronised:
            how += ", between server groups they are averaged"
        yield f"running statistics ({kept[0] or 'model'}{', …' if len(kept) > 1 else ''}): {how}"
    for optimizer in optimizers:
        name = type(optimizer).__name__
        momentum = max(group.get("momentum") or 0 for group in optimizer.param_groups)
        if momentum and topology.worker_groups > topology.server_groups:
            yield (
                f"{name}'s momentum {momentum:g}: groups share it, and their staleness acts as more of it; "
                "lower it where training is unstable"
            )
        if any("initial_lr" in group for group in optimizer.param_groups):
            yield f"{name}'s lr is scheduled: each group follows its own steps, and its updates its own rate"


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats
