"""The run, as a training script sees it: one-line methods over what `training` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset

from shoal import sampling
from shoal.batch import Hold
from shoal.data import Loader, make_loader
from shoal.errors import UsageError
from shoal.events import Events
from shoal.leases import Tenant
from shoal.sampling import Place
from shoal.site import Membership, Site
from shoal.training import Training

_T = TypeVar("_T")
_U = TypeVar("_U")
_V = TypeVar("_V")


class Run:
    """One worker's view of the run; made by `shoal.init()`."""

    def __init__(self, membership: Membership, site: Site, events: Events) -> None:
        self._m = membership
        self._training = Training(membership, site, events)

    # Who am I?

    @property
    def rank(self) -> int:
        """This worker's number over all groups, 0 … world_size − 1."""
        return self._m.topology.rank(self._m.member)

    @property
    def world_size(self) -> int:
        """Workers over all groups; servers do not count."""
        return len(self._m.topology.workers)

    @property
    def group(self) -> int:
        """This worker's group, 0 … num_groups − 1."""
        return self._m.member.group

    @property
    def num_groups(self) -> int:
        """Worker groups."""
        return self._m.topology.worker_groups

    @property
    def rank_in_group(self) -> int:
        """This worker's number in its group, from 0."""
        return self._m.member.index

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0.0: the one that prints and saves."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine; `rank`, where a run has one machine."""
        return self.rank if self._m.local_rank is None else self._m.local_rank

    @property
    def device(self) -> torch.device:
        """Where this worker's model belongs: a GPU, shared where there are fewer than workers; or the CPU."""
        return self._m.device

    @property
    def global_step(self) -> int:
        """Iterations of this worker's loaders so far; of its (first) optimizer where it has no loader."""
        return self._training.iterations if self._training.loaders else self._training.step_of()

    # Training.

    @overload
    def prepare(self, first: _T, /, *, ema: float | None = None, overlap: bool = False) -> _T: ...
    @overload
    def prepare(
        self, first: _T, second: _U, /, *, ema: float | None = None, overlap: bool = False
    ) -> tuple[_T, _U]: ...
    @overload
    def prepare(
        self, first: _T, second: _U, third: _V, /, *, ema: float | None = None, overlap: bool = False
    ) -> tuple[_T, _U, _V]: ...
    @overload
    def prepare(self, *objects: Any, ema: float | None = None, overlap: bool = False) -> Any: ...
    def prepare(self, *objects: Any, ema: float | None = None, overlap: bool = False) -> Any:
        """Hand models and optimizers to the servers; the same objects come back, in the same order.

        From here on `optimizer.step()` pushes this worker's gradients and returns when the servers' new
        values are in the model. Worker 0.0's values and optimizer state are everyone's start. Each `p.grad`
        stays this worker's own gradient, not the group's average.

        Args:
            objects: models, optimizers, and what else shall come back.
            ema: servers keep an exponential moving average of the parameters as well, with this decay (0 to
                below 1): ema ← decay · ema + (1 − decay) · value after every round. `evaluate`, `save`,
                `save_best` and `state_dict` give it with ema=True.
            overlap: `optimizer.step()` returns at once; new values are written into a model when its modules'
                next forwards begin, and at `wait()` and whatever else looks at the model.

        Raises:
            UsageError: no optimizer, no trainable parameter, an impossible decay, or a second call.
            OptimizerRefused: an optimizer that servers cannot run.
            ModelMismatch: names, shapes, dtypes or the decay differ from worker 0.0's.
            WaitTimeout: the servers do not answer within timeouts.start.
        """
        self._training.prepare(objects, ema, overlap)
        return objects[0] if len(objects) == 1 else objects

    def loader(self, data: Dataset[Any] | DataLoader[Any], **keywords: Any) -> Loader:
        """Deal a dataset to all workers: each sample once per epoch, over all groups.

        Args:
            data: a dataset, a stream (IterableDataset), or a DataLoader to take all settings from.
            keywords: DataLoader's; `batch_size` is per worker (a number, or numbers by rank in the group),
                `shuffle` is True unless said otherwise. `sharded=True`: this stream is the worker's own part.
                `leased=False`: dealt also where the block says `data: leased`.

        Raises:
            UsageError: for what cannot be dealt, or a sampler that would deal once more.
        """
        seed, topology = self._m.config.seed, self._m.topology
        loader = make_loader(
            data,
            Place(seed, topology.worker_groups, topology.workers_per_group, self.group, self.rank_in_group),
            on_batch=self._training.drawn,
            stopped=lambda: self._training.stopping,
            agree=lambda more: any(self.gather(more)),
            tenant=self._tenant(),
            **keywords,
        )
        self._training.loaders.append(loader)
        return loader

    def _tenant(self) -> Tenant | None:
        """How the next loader comes by its batches; None where each group has its fixed part."""
        topology, training = self._m.topology, self._training
        if self._m.config.cluster.data == "dealt" or topology.worker_groups == topology.server_groups:
            return None
        part = topology.server_group_of(self.group)
        return Tenant(training.lessor, len(training.loaders), topology.server_groups, part)

    def epochs(self, count: int) -> Iterator[int]:
        """Count epochs 0 … count − 1; at their end the other groups no longer wait for this worker."""
        return self._loop(iter(range(count)))

    def steps(self, loader: Loader, count: int) -> Iterator[Any]:
        """The loader's batches, epoch after epoch, until this group has taken `count` iterations."""
        return self._loop(batch for _, batch in zip(range(count), loader.endless(), strict=False))

    def _loop(self, items: Iterator[_T]) -> Iterator[_T]:
        self._training.begin_loop()
        try:
            for item in items:
                yield item
                if self._training.stopping:
                    return
        finally:
            self._training.end_loop()

    def hold(self) -> Hold:
        """From now on gradients leave at `step()`, not during backward; for scripts that change them.

        As a context (`with run.hold():`) only until its end.
        """
        return Hold(self._training.batch)

    def accumulate(self) -> AbstractContextManager[None]:
        """A context for all but the last backward of a step: nothing is pushed inside it."""
        return self._training.accumulate()

    def weight(self, count: float) -> None:
        """Say what the coming step of this worker weighs in its group's average; before its backward.

        Args:
            count: samples or tokens behind the gradient, over all parts of the step; 0 leaves it out.
        """
        if not 0 <= count < float("inf"):
            raise UsageError(f"a step cannot weigh {count}", remedy="give the number of samples or tokens")
        self._training.batch.weigh(count)

    def wait(self) -> None:
        """With overlap=True: have all new values in the models, before the script itself uses parameters.

        Raises:
            WaitTimeout: the servers do not answer within timeouts.values.
        """
        self._training.wait()

    def edit(self) -> AbstractContextManager[None]:
        """A context in which the script may change parameters, between two steps (a clamp, for instance).

        All workers of the group make the same changes; those of its worker 0 go to the servers. Where other
        groups have moved a value meanwhile, the change is added to what they did.
        """
        return self._training.edit()

    def stop(self) -> None:
        """Ask all groups to end their loops: each does, together, after one of its next steps."""
        self._training.stop_asked = True

    def track(self, name: str, tracked: _T) -> _T:
        """Name an object with a state_dict, such as a scheduler, as part of the run's state; returns it."""
        if not (hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict")):
            raise UsageError(
                f"{name} has no state_dict and load_state_dict", remedy="give it both, or leave it out"
            )
        self._training.tracked[name] = tracked
        return tracked

    def shard(self, items: Iterable[_T]) -> Iterator[_T]:
        """This worker's part of anything iterable: every `world_size`-th item, over all groups."""
        return sampling.shard(items, self.rank, self.world_size)

    def clip_grad_norm_(
        self, max_norm: float, *, scaler: Any = None, optimizer: torch.optim.Optimizer | None = None
    ) -> float:
        """Clip the group's averaged gradient in the coming `step()`; call it last before that.

        Args:
            max_norm: the largest norm (2-norm over all parameters of the optimizer) that is let through.
            scaler: the GradScaler in use, if any; the norm is then of the unscaled gradient.
            optimizer: needed only where several are prepared.

        Returns:
            the exact norm of the group's averaged gradient before clipping; nan where it is not finite.

        Raises:
            GradientEdited: a gradient was changed after it was pushed.
        """
        return self._training.clip_grad_norm_(max_norm, scaler, optimizer)

    def clip_grad_value_(self, limit: float, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clip each element of the group's averaged gradient to −limit … limit in the coming `step()`.

        Of a loss that is scaled, the gradient is unscaled first; after `clip_grad_norm_`, what is left is
        clipped. All workers of the group make the same call.

        Args:
            limit: 0 or more; of real numbers only, as in torch.
            optimizer: needed only where several are prepared.
        """
        self._training.clip_grad_value_(limit, optimizer)

    def log(self, **values: Any) -> None:
        """Note named numbers (or one-element tensors): `loss` is shown live, the last ones at the end."""
        self._training.log(values)

    # Between the workers of a group; all of them make the same calls.

    def mean(self, value: _T) -> _T:
        """The mean over this group's workers of a number (a float then) or a tensor (its shape and dtype)."""
        return self._training.collectives.mean(value)  # type: ignore[no-any-return]

    def gather(self, value: _T) -> list[_T]:
        """Every worker's value, in the order of ranks: tensors, numbers, text, lists or dicts of them."""
        return self._training.collectives.gather(value)

    def barrier(self) -> None:
        """Wait until every worker of the group is here."""
        self._training.collectives.gather(None)

    @property
    def process_group(self) -> ProcessGroup:
        """torch's default process group, made of this group's workers, for collectives of one's own.

        Gloo; for tensors on GPUs NCCL, where each worker of the group has a GPU of its own.

        Raises:
            UsageError: where workers are threads.
        """
        return self._training.collectives.process_group

    def print(self, *values: object) -> None:
        """Print on the main worker only."""
        if self.is_main:
            print(*values, flush=True)

    # Evaluation and files.

    def evaluate(
        self,
        function: Callable[..., _T],
        *args: Any,
        data: Dataset[Any] | DataLoader[Any] | None = None,
        batch_size: int | None = None,
        ema: bool = False,
        **keywords: Any,
    ) -> _T:
        """Evaluate the model and give the result to all; every worker of the group must call it.

        Inside the loop models hold the server group's present values meanwhile, and afterwards what they held
        before, in the modes (`train`, `eval`) of before. After the loop all live groups first finish; then
        one call serves everyone. Without `data` worker 0 of the group (after the loop worker 0.0) runs
        `function(*args, **keywords)`. With it every worker runs `function(batches, *args, **keywords)` on its
        part of the samples, and all get the mean of what these return, weighted by their samples. Workers
        without samples are left out; `batches.samples` counts those handed out.

        Args:
            data: a dataset, a stream, or a DataLoader, whose sampler then says which samples; each is
                evaluated exactly once.
            batch_size: samples per worker in a batch of a dataset; 1 unless said otherwise.
            ema: with the moving averages of parameters, and present buffers. After the loop these are the
                averages of worker 0.0's server group, and only workers on that group evaluate.

        Returns:
            what the function returned: numbers, text, lists or dicts of them. With `data` the function must
            return means over its samples, as numbers, tensors, or lists or dicts of them; all get numbers.

        Raises:
            PeerFailed: the function failed on another worker.
            UsageError: data that cannot be dealt or has no samples, results that have no mean, ema=True
                without `prepare(..., ema=decay)`.
            WaitTimeout: after timeouts.evaluate seconds.
        """

        def test(*first: Any) -> _T:
            return function(*first, *args, **keywords)

        return self._training.evaluator.evaluate(test, data, batch_size, ema)  # type: ignore[no-any-return]

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The complete, current model by plain names, as copies; after the loop: of all groups together.

        Shapes and dtypes are the model's. On the main worker; elsewhere it is empty.

        Args:
            ema: parameters are the moving averages of worker 0.0's server group.
        """
        return self._training.files.state_dict(ema) if self.is_main else {}

    def save(self, path: str | os.PathLike[str], *, ema: bool = False) -> None:
        """Write `state_dict()` to a safetensors file, whole or not at all; nothing on other workers."""
        if self.is_main:
            self._training.files.save(path, ema)

    def save_best(
        self, path: str | os.PathLike[str], metric: Any, mode: str = "max", *, ema: bool = False
    ) -> bool:
        """`save()` if the metric is the best of this worker's calls with this path; all workers may call it.

        The first call saves, over a file of an earlier run as well. What is saved is the present model: other
        groups may have moved it since it was evaluated.

        Args:
            metric: a number, or a tensor of one element; nan is never the best.
            mode: "max" or "min": which metric is best.

        Returns:
            whether it is the best; where all call with the same metric, all get the same answer.
        """
        return self._training.files.save_best(path, metric, mode, ema, writes=self.is_main)

    def close(self) -> None:
        """End this worker's part; called for you when the script ends."""
        self._training.close()
