"""Evaluation: whose values, who computes, how the others get the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import nn

from shoal.data import make_part
from shoal.errors import UsageError
from shoal.exchange import Exchange
from shoal.parameters import Replica
from shoal.results import Shared
from shoal.sampling import Place
from shoal.site import Membership, Site
from shoal.sources import Ready, Source
from shoal.topology import Member
from shoal.waiting import Outcome
from shoal.wire import Pull


class Trained(Protocol):
    """What is asked of the training that is evaluated or saved.

    Attributes:
        models: what was prepared.
        left: the loop is over.
    """

    models: Sequence[nn.Module]
    left: bool

    def asked(self, ema: bool, together: int = 0) -> Pull:
        """The question for present values or averages; raises UsageError where no averages are kept."""
        ...

    def joined(self) -> tuple[Replica, Exchange]:
        """The model and its servers; raises UsageError before `prepare()`."""
        ...

    def settle(self) -> None:
        """Have all new values in the model; after a loop wait for all groups, then hold the common end."""
        ...

    def pending(self) -> Mapping[int, set[int]]:
        """For each optimizer, the buffers that have changed since its last step, and that the next pushes."""
        ...

    def install(self, outcome: Outcome, pending: Mapping[int, set[int]] | None = None) -> None:
        """Write values into the models; these buffers then are to be pushed."""
        ...


class Part:
    """One worker's part of an evaluation's samples, in batches.

    Args:
        check: called before each batch is handed out.

    Attributes:
        samples: handed out by the iteration in progress, or the last one.
    """

    def __init__(self, source: Source, check: Callable[[], None]) -> None:
        self.samples = 0
        self._source, self._check = source, check
        self._opened: Iterator[Ready] | None = None

    def __bool__(self) -> bool:
        """Whether there is any sample."""
        opened = self._open()
        first = next(opened, None)
        self._opened = None if first is None else chain([first], opened)
        return first is not None

    def __iter__(self) -> Iterator[Any]:
        opened, self._opened = self._opened or self._open(), None
        self.samples = 0
        for ready in opened:
            self._check()
            self.samples += ready.weight
            yield ready.content

    def _open(self) -> Iterator[Ready]:
        return (ready for ready in self._source.batches(0, 0, None) if ready.weight)


class Evaluator:
    """Evaluates what is trained.

    Inside the loop that is a matter of the worker group: models hold the server group's present values
    meanwhile. After it all worker groups call, and models hold the common end.
    """

    def __init__(self, membership: Membership, site: Site, trained: Trained) -> None:
        self._m, self._trained = membership, trained
        self._shared = Shared(membership, site)
        self._calls: Counter[str] = Counter()

    def evaluate(self, test: Callable[..., Any], data: Any, batch_size: int | None, ema: bool) -> Any:
        """See Run.evaluate; `test` is called with the batches where there are data."""
        if data is None and batch_size is not None:
            raise UsageError(
                "run.evaluate was given batch_size without data",
                remedy="give the dataset as well: run.evaluate(function, data=dataset, batch_size=256)",
            )
        return self._alone(test, ema) if data is None else self._together(test, data, batch_size, ema)

    def _alone(self, test: Callable[[], Any], ema: bool) -> Any:
        """What `test` returns on the first of those who could evaluate."""
        evaluators, waiting, key = self._begin(ema)
        asked = self._trained.asked(ema)

        def shown() -> Any:
            with self._showing(asked):
                return test()

        return self._shared.compute(key, shown, by=evaluators[0], alone=len(waiting) == 1)

    def _together(self, test: Callable[[Part], Any], data: Any, batch_size: int | None, ema: bool) -> Any:
        """The mean, over all samples of `data`, of what `test` returns for each evaluator's part."""
        evaluators, _, key = self._begin(ema)
        ours, count = self._m.member in evaluators, len(evaluators)
        rank = evaluators.index(self._m.member) if ours else 0
        source = make_part(data, Place(self._m.config.seed, workers=count, rank=rank), batch_size)
        asked = self._trained.asked(ema, self._calls.total() if count > 1 else 0)

        def part(check: Callable[[], None]) -> tuple[int, Any]:
            batches = Part(source, check)
            if not batches:
                return 0, None
            with self._showing(asked):
                result = test(batches)
            if batches.samples:
                return batches.samples, result
            raise UsageError(
                "the evaluation's function has not looked at its batches",
                remedy="let it take the batches as its first argument, and iterate over them",
            )

        return self._shared.mean(key, evaluators, part)

    def _begin(self, ema: bool) -> tuple[Sequence[Member], Sequence[Member], str]:
        """Who may evaluate, who waits for the result, and this call's name."""
        topology, group = self._m.topology, self._m.member.group
        self._trained.joined()
        self._trained.settle()
        # Groups may have evaluated more or less often inside the loop.
        whose = "all" if self._trained.left else str(group)
        self._calls[whose] += 1
        waiting, groups = topology.workers, set(range(topology.worker_groups))
        if not self._trained.left:
            waiting, groups = tuple(w for w in waiting if w.group == group), {group}
        elif ema or not topology.synchronised:  # others than worker 0.0's servers have other values
            groups = set(topology.worker_groups_of(0))
        return [w for w in waiting if w.group in groups], waiting, f"evaluate/{whose}/{self._calls[whose]}"

    @contextmanager
    def _showing(self, asked: Pull) -> Iterator[None]:
        """Models hold what is asked of the servers; afterwards their values and modes of before."""
        replica, exchange = self._trained.joined()
        modes = {module: module.training for model in self._trained.models for module in model.modules()}
        own, pending = replica.snapshot(), self._trained.pending()
        try:
            if asked.ema or not self._trained.left:
                self._trained.install(exchange.pull(asked))
            yield
        finally:
            self._trained.install(Outcome(dict(own)), pending)
            for module, mode in modes.items():
                module.training = mode
