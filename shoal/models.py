"""Models and optimizers as the plan's input: names, shapes, and who trains what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.parameters import BufferAt, dtype_name
from shoal.partition import Buffer, Parameter
from shoal.rows import refuse_max_norm, tables_of

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Modules of torch that exchange gradients or parameters themselves."""


def refuse_wrappers(models: Sequence[nn.Module]) -> None:
    """Raise UsageError for a model that torch's own data parallelism has taken over, in whole or in part."""
    for module in (module for model in models for module in model.modules()):
        for cls in type(module).__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                raise UsageError(
                    f"the model contains a {cls.__name__}, which would exchange gradients a second time",
                    remedy="Shoal takes the plain model: "
                    + ("leave out fully_shard" if cls.__name__ == "FSDPModule" else "pass model.module"),
                )


class Described(NamedTuple):
    """Models and optimizers as the plan's input, beside the tensors it is about."""

    parameters: tuple[Parameter, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]
    places: tuple[BufferAt, ...]

    @property
    def all(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [*self.tensors, *(place.tensor for place in self.places)]


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def named_models(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each model with the prefix of its names: none for a single model, "0.", "1.", … for several."""
    for position, model in enumerate(models):
        yield (f"{position}." if len(models) > 1 else ""), model


def describe(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], whole: Sequence[bool]
) -> Described:
    """List what the optimizers train and the models carry along, in the order of the models.

    Args:
        whole: for each optimizer, whether it must see whole parameters.

    Raises:
        UsageError: for a parameter in two optimizers, an uninitialised one, or none at all.
        ParameterEdited: for a lookup with max_norm.
    """
    owners, tables = _owners(optimizers), tables_of(models)
    refuse_max_norm(models, tuple(owners))
    names: dict[Tensor, str] = {}
    for prefix, model in named_models(models):
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, prefix + plain_name(name))
            if nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"{names[parameter]} has no shape yet",
                    remedy="run one forward pass before prepare() to materialise it",
                )
    ordered = [t for t in names if t in owners] + [t for t in owners if t not in names]
    if not any(t.requires_grad and t.numel() for t in ordered):
        raise UsageError(
            "the optimizers have no parameter to train",
            remedy="prepare the optimizer that holds the model's parameters, and let them require gradients",
        )
    for count, tensor in enumerate(owners):
        if tensor not in names:
            names[tensor] = f"optimizer.{count}"
    parameters = []
    for tensor in ordered:
        optimizer, settings = owners[tensor]
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        kind = whole[optimizer], tables.get(tensor, 0)
        parameters.append(Parameter(names[tensor], shape, dtype, optimizer, settings, *kind))
    buffers, places = _buffers(models, owners)
    return Described(tuple(parameters), tuple(ordered), buffers, places)


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, tuple[int, int]]:
    """Parameter → (optimizer, param group)."""
    owners: dict[Tensor, tuple[int, int]] = {}
    for number, optimizer in enumerate(optimizers):
        for settings, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if owners.setdefault(tensor, (number, settings))[0] != number:
                    raise UsageError(
                        f"a parameter of shape {tuple(tensor.shape)} is in two optimizers",
                        remedy="give each parameter to one optimizer",
                    )
    return owners


def _buffers(
    models: Sequence[nn.Module], owners: dict[Tensor, tuple[int, int]]
) -> tuple[tuple[Buffer, ...], tuple[BufferAt, ...]]:
    """Every buffer once; it travels with the optimizer of its model's first parameter."""
    buffers, places, seen = [], [], set()
    for prefix, model in named_models(models):
        optimizer = next((owners[p][0] for p in model.parameters() if p in owners), 0)
        for path, module in model.named_modules():
            for key, buffer in (*module._buffers.items(), *module._parameters.items()):
                if buffer is None or buffer in seen or buffer in owners:
                    continue
                seen.add(buffer)
                name = prefix + plain_name(f"{path}.{key}" if path else key)
                buffers.append(Buffer(name, tuple(buffer.shape), dtype_name(buffer.dtype), optimizer))
                places.append(BufferAt(module, key))
    return tuple(buffers), tuple(places)
