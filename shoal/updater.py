"""torch.optim on pieces of parameters: the arithmetic is PyTorch's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from shoal.errors import OptimizerRefused
from shoal.parameters import as_bytes, dtype_name, frames_of, from_bytes
from shoal.partition import Parameter
from shoal.rows import Content, Rows
from shoal.wire import Frame, OptimizerSpec, State

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"}
)
"""Optimizers of torch.optim whose update of an element depends on that element alone."""

SPARSE_ONLY = frozenset({"SparseAdam"})
"""Elementwise as well, but for tables with sparse gradients only."""

NEEDS = {"LBFGS": "it evaluates the loss itself (a closure)"}

NOT_SENT = frozenset({"params", "param_names", "capturable"})
"""Of a param group: `capturable` is about CUDA graphs, which servers do not use."""

PLAIN = frozenset({float, int, bool, str, type(None)})

Settings = tuple[dict[str, Any], ...]

_Run = tuple[int, ...]  # numbers of pieces


def plain(value: Any) -> Any:
    """A hyperparameter without tensors: a number, text, None or a list of them."""
    if type(value) in PLAIN:  # as most are, and each step asks
        return value
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """The hyperparameters of each param group, as they travel."""
    return tuple(
        {key: plain(value) for key, value in group.items() if key not in NOT_SENT}
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
        return cls.__name__ in ELEMENTWISE | SPARSE_ONLY
    return bool(getattr(cls, "elementwise", False))


def spec_of(optimizer: torch.optim.Optimizer, allowed: Sequence[str]) -> OptimizerSpec:
    """The optimizer as it travels; raises OptimizerRefused for one that servers cannot run."""
    name = class_name(type(optimizer))
    resolve(name, allowed)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerRefused(
            "differentiable=True cannot be had: no gradient flows through the servers' step",
            remedy="leave it out, or train the outer problem with one plain process",
        )
    defaults = {key: plain(value) for key, value in optimizer.defaults.items() if key not in NOT_SENT}
    return OptimizerSpec(name, defaults, settings_of(optimizer))


def refuse_gradients(
    parameters: Sequence[Parameter], specs: Sequence[OptimizerSpec], allowed: Sequence[str]
) -> None:
    """Raise OptimizerRefused, with torch's reason, for gradients that an optimizer does not take.

    What it takes (sparse, dense, complex) depends on its settings too, so that two steps are tried on a few
    elements. Classes of the user's are not tried: they may look at more.
    """
    tried = set()
    for parameter in parameters:
        spec, row = specs[parameter.optimizer], parameter.row
        cls = resolve(spec.name, allowed)
        kind = parameter.optimizer, parameter.settings, row, parameter.dtype
        if kind in tried or not parameter.numel or not (row or spec.name.startswith("torch.optim:")):
            continue
        tried.add(kind)
        whole = tuple(min(size, 2) for size in parameter.shape) if parameter.whole else (2,)
        values = torch.zeros((2, row) if row else whole, dtype=getattr(torch, parameter.dtype))
        gradient = Rows(torch.tensor([1]), values[1:]) if row else values.reshape(-1).clone()
        try:
            updater = Updater(cls, spec, [values], [parameter.settings])
            for _ in range(2):
                updater.step(gradient, None, spec.groups)
        except Exception as error:
            raise OptimizerRefused(
                f"{spec.name} cannot train {parameter.name}, whose gradient is "
                f"{'sparse (rows of a table)' if row else 'dense'}: {error}",
                remedy="use another optimizer for it"
                + (", SGD, Adagrad or SparseAdam, or build its module with sparse=False" if row else ""),
            ) from None


class Updater:
    """The optimizer of one chunk.

    Pieces that lie side by side, with the same settings, are one tensor to an elementwise optimizer while
    every step touches all of them: thousands of small parameters cost no more than one.

    Args:
        views: the pieces' values inside the shard: flat, of the parameter's shape where the optimizer
            must see it whole, rows × elements per row of a table.
        groups: for each piece, its param group.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        spec: OptimizerSpec,
        views: Sequence[Tensor],
        groups: Sequence[int],
    ) -> None:
        self._pieces, self._groups = tuple(views), tuple(groups)
        self._used = sorted(set(groups))
        self._runs = _runs(self._pieces, self._groups) if is_elementwise(cls) else _alone(range(len(views)))
        self._joined = {run: self._join(run) for run in self._runs}
        keywords = inspect.signature(cls).parameters
        params = [
            {
                "params": [self._joined[run] for run in self._runs if groups[run[0]] == used],
                **_tuples(spec.groups[used]),
            }
            for used in self._used
        ]
        defaults = _tuples({key: value for key, value in spec.defaults.items() if key in keywords})
        self._optimizer = cls(params, **defaults)
        # A class of somebody else's may have hooks of its own.
        self._step = bare_step(self._optimizer) if _torchs(cls) else self._optimizer.step
        self._settings = Settings()

    def _join(self, run: _Run) -> Tensor:
        first = self._pieces[run[0]]
        if len(run) == 1:
            return first
        size = sum(self._pieces[index].numel() for index in run)
        return first.as_strided((size,), (1,), first.storage_offset())

    def step(self, gradient: Content, touched: Sequence[int] | None, settings: Settings) -> None:
        """One update. `gradient`: the chunk's; pieces that are not touched keep values and state."""
        if settings is not self._settings:
            assign_settings(self._optimizer, [settings[used] for used in self._used])
            self._settings = settings
        if touched is not None:
            self._split(set(touched))
        at = 0
        for run in self._runs:
            view = self._joined[run]
            if isinstance(gradient, Rows):
                view.grad = gradient.sparse(len(view))
                continue
            part = gradient[at : at + view.numel()]
            at += view.numel()
            if touched is None or run[0] in touched:
                view.grad = part.view(view.shape)
        self._step()
        for view in self._joined.values():
            view.grad = None

    def _split(self, touched: set[int]) -> None:
        """Pieces of a run of which only some are touched have steps and state of their own from now on."""
        mixed = [run for run in self._runs if len({index in touched for index in run}) > 1]
        for run in mixed:
            state = self._optimizer.state.pop(self._joined[run], {})
            members = self._optimizer.param_groups[self._used.index(self._groups[run[0]])]["params"]
            joined = self._joined.pop(run)
            members[:] = [member for member in members if member is not joined]
            for index, part in zip(run, self._cut(run, state), strict=True):
                view = self._joined[index,] = self._pieces[index]
                members.append(view)
                if part:
                    self._optimizer.state[view] = part
        if mixed:
            self._runs = sorted(self._joined)

    def _cut(self, run: _Run, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A run's state, for each of its pieces."""
        if len(run) == 1:
            return [dict(state)]
        sizes = [self._pieces[index].numel() for index in run]
        found: list[dict[str, Any]] = [{} for _ in run]
        for key, value in state.items():
            parts: Iterable[Any] = repeat(value)
            if isinstance(value, Tensor):
                cut = value.shape == (sum(sizes),)
                parts = (part.clone() for part in (torch.split(value, sizes) if cut else repeat(value)))
            for part_state, part in zip(found, parts, strict=False):
                part_state[key] = part
        return found

    def moved(self, gradient: Rows) -> Tensor | None:
        """Numbers of the rows that a step with this gradient has changed; None = perhaps all.

        torch's optimizers change the gradient's rows, and those of sparse state, such as SGD's momentum.
        """
        if not _torchs(type(self._optimizer)):
            return None
        sparse = (tensor for tensor in _tensors(self._optimizer) if tensor.is_sparse)
        return torch.cat([gradient.index, *(tensor._indices()[0] for tensor in sparse)])

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return state_bytes(self._optimizer)

    def export(self) -> tuple[list[State], list[Frame]]:
        """The state as it travels: entries, and a raw frame for each tensor among them."""
        states = (self._cut(run, self._optimizer.state.get(self._joined[run], {})) for run in self._runs)
        return pack(chain.from_iterable(states))

    def load(self, entries: Sequence[State], frames: Sequence[Frame]) -> None:
        """Take over a state that `export` or a worker's optimizer made."""
        for piece in range(len(self._pieces)):
            self._split({piece})  # each piece may have taken another number of steps
        for entry, value in unpack(entries, frames):
            view = self._pieces[entry.piece]
            wide = entry.dtype and not entry.rows and entry.key != "step" and value.is_floating_point()
            if wide and value.shape == view.shape:
                value = value.to(view.dtype)  # a master is wider than the worker's state
            self._optimizer.state[view][entry.key] = value


def _torchs(cls: type[torch.optim.Optimizer]) -> bool:
    return class_name(cls).startswith("torch.optim:")


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step of an optimizer's class without what torch wraps around it for profilers and hooks.

    That takes longer than a small step itself.
    """
    cls = type(optimizer)
    wrapped: Any = cls.step
    step: Callable[[Any], Any] = getattr(wrapped, "__wrapped__", wrapped)
    # torch's own switch gradients off themselves
    return partial(step if _torchs(cls) else torch.no_grad()(step), optimizer)


def _alone(indices: Iterable[int]) -> list[_Run]:
    return [(index,) for index in indices]


def _runs(pieces: Sequence[Tensor], groups: Sequence[int]) -> list[_Run]:
    """Which flat pieces lie side by side in memory and share their settings, in order.

    Half precision is left apart: torch rounds the last elements of a tensor otherwise than those before.
    """
    runs: list[list[int]] = []
    end = -1
    for index, piece in enumerate(pieces):
        flat = piece.dim() == 1 and piece.dtype in (torch.float32, torch.float64)
        beside = flat and piece.data_ptr() == end and groups[index] == groups[index - 1]
        if beside:
            runs[-1].append(index)
        else:
            runs.append([index])
        end = piece.data_ptr() + piece.nbytes if piece.dim() == 1 else -1
    return [tuple(run) for run in runs]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    sparse = [t for t in _tensors(optimizer) if t.is_sparse]
    parts = [part for t in sparse for part in (t._indices(), t._values())]
    return sum(t.nbytes for t in (*parts, *(t for t in _tensors(optimizer) if not t.is_sparse)))


def pack(states: Iterable[Mapping[str, Any]]) -> tuple[list[State], list[Frame]]:
    """Optimizer state of several pieces as entries and raw frames."""
    entries: list[State] = []
    frames: list[Frame] = []
    for piece, state in enumerate(states):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_sparse:
                entries.append(State(piece, key, None, dtype_name(value.dtype), tuple(value.shape), True))
                flat = value.detach().coalesce()
                frames += frames_of(Rows(flat.indices()[0].cpu(), flat.values().cpu()))
            elif isinstance(value, Tensor):
                entries.append(State(piece, key, None, dtype_name(value.dtype), tuple(value.shape)))
                frames.append(as_bytes(value.detach().cpu().contiguous()))
            else:
                entries.append(State(piece, key, value))
    return entries, frames


def unpack(entries: Sequence[State], frames: Sequence[Frame]) -> Iterator[tuple[State, Any]]:
    """Each entry of a state that `pack` made, with its value."""
    tensors = iter(frames)
    for entry in entries:
        value: Any = entry.value
        if entry.rows:
            index = from_bytes(next(tensors), "int64").clone()
            rows = from_bytes(next(tensors), entry.dtype).clone().view(len(index), *entry.shape[1:])
            value = Rows(index, rows).sparse(entry.shape[0])
        elif entry.dtype:
            value = from_bytes(next(tensors), entry.dtype).clone().view(entry.shape)
        yield entry, value


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
