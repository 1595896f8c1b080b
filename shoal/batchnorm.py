"""SyncBatchNorm over a worker group: the statistics of the joined batch, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.batch import Batch
from shoal.collectives import Collectives


class Group(NamedTuple):
    """A layer's worker group: what its workers tell each other, and what this one's step weighs."""

    collectives: Collectives
    batch: Batch


def synchronise(models: Iterable[nn.Module], group: Group) -> None:
    """Let every SyncBatchNorm of the models take its statistics over the group.

    torch's own does that on GPUs only, and silently does not where no default process group exists. A layer
    that was given a process group, or that has a forward of its own, stays as it is.
    """
    for module in (module for model in models for module in model.modules()):
        cls = type(module)
        if isinstance(module, nn.SyncBatchNorm) and _as_torch_made_it(module):
            members = {"group": group, "own": cls, "__module__": cls.__module__}
            module.__class__ = type(cls.__name__, (_Synchronised, cls), members)


def _as_torch_made_it(module: nn.SyncBatchNorm) -> bool:
    return type(module).forward is nn.SyncBatchNorm.forward and module.process_group is None


class _Synchronised(nn.SyncBatchNorm):
    """What goes in front of a layer's own class.

    Attributes:
        own: that class; copies and files of the layer have it again.
    """

    group: Group
    own: type[nn.SyncBatchNorm]

    def forward(self, inputs: Tensor) -> Tensor:
        """BatchNorm on the joined batch of the group; inputs: samples × channels × …."""
        self._check_input_dim(inputs)
        alone = not self.training or self.group.collectives.size == 1
        outputs: Tensor = (_BatchNorm.forward if alone else type(self)._joined)(self, inputs)
        return outputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _joined(self, inputs: Tensor) -> Tensor:
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        dims = [dim for dim in range(wide.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(wide.dim())]
        # A worker without samples of its own (the last batch of an epoch) repeats one, which counts nothing.
        counts = float(self.group.batch.weight > 0)
        own = torch.tensor([counts * wide.numel() / wide.shape[1]]).to(wide)
        total = _total(torch.cat([own, counts * wide.detach().sum(dims)]), self.group)
        count = total[0].clamp(min=1)
        centre = total[1:] / count
        # Neither mean nor variance depends on the point that is subtracted first, which only saves digits.
        around = wide - centre.view(shape)
        sums = torch.stack([around.sum(dims), around.square().sum(dims)])
        offset, square = _Sum.apply(counts * sums, self.group) / count  # type: ignore[no-untyped-call]
        variance = square - offset.square()
        if total[0]:
            self._follow(centre + offset, variance * (count / (count - 1).clamp(min=1)))
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        outputs: Tensor = (around - offset.view(shape)) * scale.view(shape)
        return (outputs if self.bias is None else outputs + self.bias.view(shape)).to(inputs.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(variance.to(self.running_var.dtype), part)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (self.own,), self.__dict__


def _total(own: Tensor, group: Group) -> Tensor:
    """The sum of the workers' tensors, on this one's device."""
    return torch.stack(group.collectives.gather(own)).sum(0).to(own.device)


class _Sum(torch.autograd.Function):
    """The sum of the workers' tensors; its gradient is the one of the group's loss.

    That loss is the average of the workers' by weight; and a server is about to weigh this worker's gradient.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _total(own, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = ctx.group.batch.weight
        total = _total(weight * gradient, ctx.group)
        return (total / weight if weight else torch.zeros_like(total)), None
