"""With overlap=True new values come during the next forward: who waits for which, and when.

A module waits, before its forward, for its own parameters and buffers and for those of modules inside it that
will not wait for themselves: last time they did not run, so that it may use them itself. What has never run
in this way waits for everything inside it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from shoal.arrivals import Arrivals
from shoal.parameters import Replica, pieces_of


class _Way(NamedTuple):
    """How a module runs: in eval() or without gradients its forward may take another path."""

    module: nn.Module
    training: bool
    gradients: bool


@dataclass
class _Run:
    """A forward in progress, and the modules that have run inside it so far."""

    way: _Way
    inside: set[nn.Module] = field(default_factory=set)


class Forwards:
    """Has new values in place before a forward needs them.

    A module that torch has compiled is one unit, because hooks inside it might never run.

    Args:
        arrivals: each optimizer's.

    Attributes:
        uncovered: chunks with something in them that no forward waits for.
        aside: parameters are handed out without waiting.
    """

    def __init__(self, models: Sequence[nn.Module], replica: Replica, arrivals: Sequence[Arrivals]) -> None:
        self.aside = False
        self._arrivals = arrivals
        self._chunks = _chunks_by_tensor(replica)
        self._running: list[_Run] = []
        self._ran: dict[_Way, set[nn.Module]] = {}
        self._needs: dict[_Way, set[int]] = {}
        self._before, self._after = _Hook(self._begin), _Hook(self._end)
        self._shown = _Hook(lambda *_: self.install())
        hooked: set[nn.Module] = set()
        for model in models:
            for module in _entered(model, hooked):
                self._attend(module)
        entered = hooked.intersection(models)
        covered = {tensor for model in entered for tensor in _tensors(model, recurse=True)}
        left = (chunks for tensor, chunks in self._chunks.items() if tensor not in covered)
        self.uncovered = set().union(*left)
        for model in entered:
            cls = type(model)
            members = {"_shoal_forwards": self, "_shoal_own": cls, "__module__": cls.__module__}
            model.__class__ = type(cls.__name__, (_Waiting, cls), members)

    def install(self, chunks: Collection[int] | None = None) -> None:
        """Have the new values of these chunks in the model; None = of all."""
        for arrivals in self._arrivals:
            arrivals.install(arrivals.missing if chunks is None else chunks)

    def hand_out(self, tensor: Tensor) -> None:
        """Have the new values of a parameter or buffer in place, for the script to look at."""
        if not self.aside:
            self.install(self._chunks.get(tensor, ()))

    def _attend(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self._shown)  # type: ignore[no-untyped-call]
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = self._around(module, module._compiled_call_impl)
            return
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def _around(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a module that was compiled in place, whose own hooks are compiled with it."""

        def around(*args: Any, **keywords: Any) -> Any:
            self._begin(module)
            result = None
            try:
                result = call(*args, **keywords)
            finally:
                self._end(module, args, result)
            return result

        return around

    def _begin(self, module: nn.Module, *_: Any) -> None:
        """A forward is about to begin."""
        run = _Run(_Way(module, module.training, torch.is_grad_enabled()))
        self._running.append(run)
        if any(arrivals.missing for arrivals in self._arrivals):
            needs = self._needs.get(run.way)
            self.install(self._needed(module, ()) if needs is None else needs)

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        """A forward is over; where it has no result it may have been broken off, and teaches nothing."""
        while self._running:
            run = self._running.pop()
            if run.way.module is not module:
                continue
            if self._running:
                self._running[-1].inside |= run.inside | {module}
            if result is not None and self._ran.get(run.way) != run.inside:
                self._ran[run.way], self._needs[run.way] = run.inside, self._needed(module, run.inside)
            return

    def _needed(self, module: nn.Module, inside: Collection[nn.Module]) -> set[int]:
        """The chunks of a module and of all in it that do not run, as these do, and wait for themselves."""
        needed = {chunk for tensor in _tensors(module) for chunk in self._chunks.get(tensor, ())}
        below = (self._needed(child, inside) for child in module.children() if child not in inside)
        return needed.union(*below)


class _Waiting(nn.Module):
    """What goes in front of a prepared model's own class: the model's looks at parameters wait as well.

    Copies and files of the model have its own class, `_shoal_own`, again.
    """

    _shoal_forwards: Forwards
    _shoal_own: type[nn.Module]

    def train(self, mode: bool = True) -> Self:
        """See Module.train; Module.eval calls it too."""
        self._shoal_forwards.install()
        return super().train(mode)

    def named_parameters(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """See Module.named_parameters; each waits when its turn comes."""
        for name, parameter in super().named_parameters(*args, **keywords):
            self._shoal_forwards.hand_out(parameter)
            yield name, parameter

    def named_buffers(self, *args: Any, **keywords: Any) -> Iterator[tuple[str, Tensor]]:
        """See Module.named_buffers; each waits when its turn comes."""
        for name, buffer in super().named_buffers(*args, **keywords):
            self._shoal_forwards.hand_out(buffer)
            yield name, buffer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See Module.zero_grad; gradients are the script's own."""
        self._shoal_forwards.aside = True
        try:
            super().zero_grad(set_to_none)
        finally:
            self._shoal_forwards.aside = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._shoal_forwards.install()
        plain = {type(self): self._shoal_own, copyreg.__newobj__: object.__new__}  # type: ignore[attr-defined]
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        return plain.get(make, make), tuple(self._shoal_own if a is type(self) else a for a in args), *rest


class _Hook:
    """A hook on a module; nothing is left of it in copies and files of the module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None: ...


def _entered(module: nn.Module, hooked: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose forwards Python runs; of what is compiled, the outermost only."""
    if module in hooked or isinstance(module, torch.jit.ScriptModule):
        return
    hooked.add(module)
    yield module
    if module._compiled_call_impl is None and "_orig_mod" not in module._modules:
        for child in module.children():
            yield from _entered(child, hooked)


def _tensors(module: nn.Module, recurse: bool = False) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _chunks_by_tensor(replica: Replica) -> dict[Tensor, set[int]]:
    """Parameter or buffer → the chunks that it lies in."""
    pieces = pieces_of(replica.plan.chunks, len(replica.tensors))
    found = {t: {chunk.number for chunk, _ in p} for t, p in zip(replica.tensors, pieces, strict=True)}
    for chunk in replica.plan.chunks:
        if chunk.buffer is not None:
            found[replica.places[chunk.buffer].tensor] = {chunk.number}
    return found
