"""What will surprise in a script: looked for in its first steps, with one worker and one server.

``python -m shoal.doctor SCRIPT [ARGS...]`` runs the script in this process, ends it after a few steps and
prints what it found.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from shoal.launcher import FAILED, FINISHED
from shoal.models import named_models, plain_name
from shoal.probe import Seen, look
from shoal.training import Prepared
from shoal.updater import is_elementwise

STEPS = 3  # that each optimizer is watched for
PATIENCE = 30  # steps of one optimizer after which the others are no longer waited for
TINY = 4  # samples from which batch statistics tell little
NAMED = 3  # names in a list of many


class Doctor:
    """Watches a script from its `prepare()` on; `findings` are sentences."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.steps: Counter[Optimizer] = Counter()
        self._prepared: Prepared | None = None
        self._names: dict[Tensor, str] = {}
        self._fed: set[Tensor] = set()
        self._backwards: Counter[Tensor] = Counter()
        self._most, self._smallest = 1, sys.maxsize
        self._called: set[str] = set()

    def examine(self, prepared: Prepared) -> None:
        """The probe: look at what is prepared, and watch it from now on."""
        self._prepared = prepared
        for prefix, model in named_models(prepared.models):
            for name, parameter in model.named_parameters():
                self._names.setdefault(parameter, prefix + plain_name(name))
            for module in model.modules():
                if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                    module.register_forward_pre_hook(self._normalised)
        self._look_at(prepared)
        for optimizer in prepared.optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
            for tensor in _held(optimizer):
                if tensor.requires_grad:
                    tensor.register_post_accumulate_grad_hook(self._fired)  # type: ignore[no-untyped-call]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notices calls that mean something else, or nothing good, under a cluster."""
        with ExitStack() as stack:
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                for place in (nn.utils, clip_grad):
                    stack.enter_context(_noticed(place, name, self._called))
            stack.enter_context(_noticed(DataLoader, "__iter__", self._called))
            yield

    # While the script runs.

    def _normalised(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training and inputs:
            self._smallest = min(self._smallest, len(inputs[0]))

    def _fired(self, tensor: Tensor) -> None:
        assert self._prepared is not None
        if not self._prepared.batch.held:
            self._backwards[tensor] += 1

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor in _held(optimizer):
            if tensor.grad is not None:
                self._fed.add(tensor)
            self._most = max(self._most, self._backwards.pop(tensor, 0))

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._prepared is not None
        self.steps[optimizer] += 1
        everyone = all(self.steps[other] >= STEPS for other in self._prepared.optimizers)
        if everyone or self.steps[optimizer] >= PATIENCE:
            raise Seen

    # What it means.

    def _look_at(self, prepared: Prepared) -> None:
        """What shows before the first step."""
        owned = {tensor for optimizer in prepared.optimizers for tensor in _held(optimizer)}
        if idle := [n for t, n in self._names.items() if t.requires_grad and t not in owned]:
            self.findings.append(
                f"{_list(idle)} in no optimizer: not trained, though it requires a gradient. Add it to one, "
                "or freeze it with requires_grad_(False)."
            )
        for optimizer in prepared.optimizers:
            if not is_elementwise(type(optimizer)):
                self.findings.append(self._whole(optimizer))
        for prefix, model in named_models(prepared.models):
            sparse = [prefix + name for name, module in model.named_modules() if getattr(module, "sparse", 0)]
            if sparse:
                self.findings.append(
                    f"{_list(sparse)} built with sparse=True: only SGD, Adagrad and SparseAdam can take such "
                    "gradients, and rows that a step does not touch stay as they are."
                )

    def _whole(self, optimizer: Optimizer) -> str:
        assert self._prepared is not None
        total = sum(parameter.nbytes for parameter in self._prepared.plan.parameters)
        largest = max(_held(optimizer), key=lambda tensor: tensor.nbytes)
        return (
            f"{type(optimizer).__name__} must see whole parameters, so none is divided between servers: "
            f"{self._names.get(largest, 'the largest')} alone is {largest.nbytes / total:.0%} of the "
            "trained bytes, and servers will be uneven where that is more than an equal part."
        )

    def conclude(self) -> list[str]:
        """All findings, once the script has ended."""
        if self._prepared is None:
            return self.findings
        stepped = [optimizer for optimizer in self._prepared.optimizers if self.steps[optimizer]]
        starved = [t for o in stepped for t in _held(o) if t.requires_grad and t not in self._fed]
        if starved:
            names = [self._names.get(tensor, "one without a name") for tensor in starved]
            self.findings.append(
                f"{_list(names)} without a gradient in {STEPS} steps: as in plain PyTorch such a parameter "
                "stays as it is, without momentum or decay. Is it used at all?"
            )
        if self._smallest <= TINY:
            self.findings.append(
                f"Batch norm saw a batch of {self._smallest}: its statistics are each worker's own, however "
                "many workers there are. Use a larger batch_size, GroupNorm, or SyncBatchNorm, which takes "
                "them over the worker group."
            )
        if self._most > 1:
            self.findings.append(
                f"{self._most} backward passes in one step: gradients wait for step() instead of leaving "
                "during backward. Put all but the last one into `with run.accumulate():`."
            )
        if len(stepped) < len(self._prepared.optimizers):
            self.findings.append("Not every optimizer made a step, so not everything could be looked at.")
        return [*self.findings, *self._clipping(), *self._data(self._prepared)]

    def _clipping(self) -> Iterator[str]:
        for name in sorted(self._called & {"clip_grad_norm_", "clip_grad_value_"}):
            yield (
                f"torch.nn.utils.{name} was called: with several workers in a group it changes gradients "
                f"that have left, an error. Call run.{name} instead, just before optimizer.step(): "
                "it clips the group's average."
            )

    def _data(self, prepared: Prepared) -> Iterator[str]:
        if not any(loader.epoch or loader.position for loader in prepared.loaders):
            own = "The script iterates over a DataLoader of its own" if "__iter__" in self._called else ""
            yield (
                f"{own or 'No batch came from run.loader'}: unless the script deals samples itself, every "
                "worker takes all of them. run.loader deals them, and knows where it stands."
            )
        for loader in prepared.loaders:
            if isinstance(loader.dataset, IterableDataset) and not hasattr(loader.dataset, "state_dict"):
                yield (
                    f"{type(loader.dataset).__name__} has no state_dict: to go on in the middle of it, it is "
                    "read again up to there."
                )


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


@contextmanager
def _noticed(place: Any, name: str, called: set[str]) -> Iterator[None]:
    """Keep the name of a function in `called` when it is called, while this lasts."""
    function = getattr(place, name)

    @wraps(function)
    def noticed(*arguments: Any, **keywords: Any) -> Any:
        called.add(name)
        return function(*arguments, **keywords)

    setattr(place, name, noticed)
    try:
        yield
    finally:
        setattr(place, name, function)


def main(script: str, args: Sequence[str]) -> int:
    """Run a script for a few steps and print what was found; the exit status."""
    doctor = Doctor()
    with doctor.listening():
        well = look(script, args, doctor.examine)
    findings = doctor.conclude()
    steps = max(doctor.steps.values(), default=0)
    print(f"{script}, {steps} steps: " + ("would surprise under a cluster:" if findings else "nothing found"))
    print("".join(f"\n* {finding}\n" for finding in findings), end="")
    return FINISHED if well else FAILED


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, which is not on the path of ``python train.py``
    sys.exit(main(sys.argv[1], sys.argv[2:]))
