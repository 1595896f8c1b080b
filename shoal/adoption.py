"""A prepared optimizer: the script's own object, whose step is the servers'."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.errors import UsageError
from shoal.own import OwnStepper
from shoal.prepare import Stepper


class _Adopted:
    """What a prepared optimizer answers, in front of its own class's answers.

    Attributes:
        stepper: does the step of the one optimizer that was prepared.
        note: tells the user something, once.
        sizes: parameters in each param group.
    """

    stepper: Stepper | OwnStepper
    note: Callable[[str], None]
    sizes: list[int]

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """One step of the group; the closure is evaluated once, before it."""
        _check(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.stepper.step(grad_scaler)
        return loss

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Too late."""
        raise UsageError(
            "a param group was added after prepare(): no server has its parameters", remedy=_EARLIER
        )

    def state_dict(self) -> dict[str, Any]:
        """The settings; the state is the servers'."""
        if self.stepper.travels:
            self.note(
                "optimizer.state_dict() holds settings only: after prepare() an optimizer's state is the "
                "servers'"
            )
        return super().state_dict()  # type: ignore[misc,no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Settings may be loaded at any time, state only before prepare()."""
        if state_dict["state"] and self.stepper.travels:
            raise UsageError(
                "an optimizer's state was loaded after prepare(), when it is the servers'",
                remedy="call optimizer.load_state_dict() before run.prepare(): servers take its state over",
            )
        super().load_state_dict(state_dict)  # type: ignore[misc]


_heard_step = torch.optim.Optimizer.profile_hook_step(_Adopted.step)


@wraps(_Adopted.step)
def _step(self: Any, *args: Any, **keywords: Any) -> Any:
    """What torch makes of a class's step; where no hook is to run and nothing is profiled, the step itself.

    Naming every step for a profiler takes longer than all that one worker beside its server does.
    """
    hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
    heard = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    step = _heard_step if heard or torch.autograd._profiler_enabled() else _Adopted.step
    return step(self, *args, **keywords)


_step.hooked = True  # type: ignore[attr-defined]

_EARLIER = (
    "give the optimizer all parameters before run.prepare(); those that are to train later may wait with "
    "requires_grad_(False)"
)


def _check(optimizer: Any) -> None:
    """Refuse to step for a copy, or for parameters that no server has."""
    if not optimizer.stepper.drives(optimizer):
        raise UsageError(
            "a copy of a prepared optimizer cannot step: its original's parameters are the servers'",
            remedy="make the second optimizer anew, over parameters of its own",
        )
    if [len(group["params"]) for group in optimizer.param_groups] != optimizer.sizes:
        raise UsageError("param_groups hold other parameters than at prepare()", remedy=_EARLIER)


def adopt(
    optimizer: torch.optim.Optimizer, stepper: Stepper | OwnStepper, note: Callable[[str], None]
) -> None:
    """Make `optimizer.step()` the stepper's: the object stays, its class becomes a subclass.

    A scheduler built earlier has left a `step` of its own on the instance, which calls the old class's; it is
    wrapped anew around the new one.
    """
    cls = type(optimizer)
    members = {
        "step": _step,
        "stepper": stepper,
        "note": staticmethod(note),
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "_step_supports_amp_scaling": True,
        "__module__": cls.__module__,
    }
    wrapped = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(cls.__name__, (_Adopted, cls), members)
    if stepper.travels:
        optimizer.state.clear()
    if wrapped is not None:
        new_step = optimizer.step

        def counted(*args: Any, **keywords: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return new_step(*args, **keywords)

        counted.__wrapped__ = new_step  # type: ignore[attr-defined]
        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = counted  # type: ignore[method-assign]
    # We take the scaler itself, because only it can be told what the other workers found.
    warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself")
