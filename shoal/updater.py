"""torch.optim on pieces of parameters: the arithmetic is PyTorch's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import OptimizerRefused
from shoal.parameters import as_bytes, dtype_name, from_bytes
from shoal.wire import Frame, OptimizerSpec, State

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"}
)
"""Optimizers of torch.optim whose update of an element depends on that element alone."""

NEEDS = {"LBFGS": "it evaluates the loss itself (a closure)", "SparseAdam": "it takes sparse gradients"}

Settings = tuple[dict[str, Any], ...]


def plain(value: Any) -> Any:
    """A hyperparameter without tensors: a number, text, None or a list of them."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """The hyperparameters of each param group, as they travel."""
    return tuple(
        {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )


def assign_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set hyperparameters that came over the wire; what is a tuple or a tensor stays one."""
    for group, new in zip(optimizer.param_groups, settings, strict=True):
        for key, value in new.items():
            old = group.get(key)
            if isinstance(old, Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def class_name(cls: type) -> str:
    """How a class is called on the wire: "module:Class"; torch's own by their public module."""
    if cls.__module__.startswith("torch.optim") and getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim:{cls.__name__}"
    return f"{cls.__module__}:{cls.__name__}"


def resolve(name: str, allowed: Sequence[str]) -> type[torch.optim.Optimizer]:
    """The optimizer class of a name; only torch.optim's and allowed ones.

    Raises:
        OptimizerRefused: with the reason and the remedy.
    """
    module, _, cls = name.partition(":")
    if module == "torch.optim":
        if cls in NEEDS:
            raise OptimizerRefused(
                f"{cls} cannot run on servers: {NEEDS[cls]}",
                remedy="use another optimizer, Adam for instance",
            )
    elif module == "__main__":
        raise OptimizerRefused(
            f"{cls} is defined in the script, which servers do not run",
            remedy=f"move it to a module of its own and pass --allow-optimizer MODULE:{cls}",
        )
    elif name not in allowed:
        raise OptimizerRefused(
            f"servers do not know the optimizer {name}",
            remedy=f"pass --allow-optimizer {name} if you trust it",
        )
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise OptimizerRefused(
            f"the optimizer {name} cannot be imported here ({error})",
            remedy="install its module on every machine",
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptimizerRefused(
            f"{name} is no torch optimizer", remedy="name a subclass of torch.optim.Optimizer"
        )
    return found


def is_elementwise(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether the optimizer may run on pieces of parameters."""
    if class_name(cls).startswith("torch.optim:"):
        return cls.__name__ in ELEMENTWISE
    return bool(getattr(cls, "elementwise", False))


def spec_of(optimizer: torch.optim.Optimizer, allowed: Sequence[str]) -> OptimizerSpec:
    """The optimizer as it travels; raises OptimizerRefused for one that servers cannot run."""
    name = class_name(type(optimizer))
    resolve(name, allowed)
    defaults = {key: plain(value) for key, value in optimizer.defaults.items()}
    return OptimizerSpec(name, defaults, settings_of(optimizer))


class Updater:
    """The optimizer of one chunk.

    Args:
        views: the pieces' values inside the shard: flat, or of the parameter's shape where the optimizer
            must see it whole.
        groups: for each piece, its param group.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        spec: OptimizerSpec,
        views: Sequence[Tensor],
        groups: Sequence[int],
    ) -> None:
        self._views = tuple(views)
        self._used = sorted(set(groups))
        keywords = inspect.signature(cls).parameters
        params = [
            {
                "params": [v for v, g in zip(views, groups, strict=True) if g == used],
                **_tuples(spec.groups[used]),
            }
            for used in self._used
        ]
        defaults = _tuples({key: value for key, value in spec.defaults.items() if key in keywords})
        self._optimizer = cls(params, **defaults)

    def step(self, gradient: Tensor, touched: Sequence[int] | None, settings: Settings) -> None:
        """One update. `gradient`: flat, the chunk's; pieces that are not touched keep values and state."""
        assign_settings(self._optimizer, [settings[used] for used in self._used])
        at = 0
        for index, view in enumerate(self._views):
            part = gradient[at : at + view.numel()]
            at += view.numel()
            if touched is None or index in touched:
                view.grad = part.view(view.shape)
        self._optimizer.step()
        for view in self._views:
            view.grad = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        tensors = (v for view in self._views for v in self._optimizer.state.get(view, {}).values())
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    def export(self) -> tuple[list[State], list[Frame]]:
        """The state as it travels: entries, and a raw frame for each tensor among them."""
        return pack(self._optimizer.state.get(view, {}) for view in self._views)

    def load(self, entries: Sequence[State], frames: Sequence[Frame]) -> None:
        """Take over a state that `export` or a worker's optimizer made."""
        tensors = iter(frames)
        for entry in entries:
            value: Any = entry.value
            if entry.dtype:
                value = from_bytes(next(tensors), entry.dtype).clone().view(entry.shape)
            self._optimizer.state[self._views[entry.piece]][entry.key] = value


def pack(states: Iterator[Mapping[str, Any]]) -> tuple[list[State], list[Frame]]:
    """Optimizer state of several pieces as entries and raw frames."""
    entries: list[State] = []
    frames: list[Frame] = []
    for piece, state in enumerate(states):
        for key, value in state.items():
            if isinstance(value, Tensor):
                entries.append(State(piece, key, None, dtype_name(value.dtype), tuple(value.shape)))
                frames.append(as_bytes(value.detach().cpu().contiguous()))
            else:
                entries.append(State(piece, key, value))
    return entries, frames


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
