"""One worker's training from prepare() to the end: what stands behind `run`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.adoption import adopt
from shoal.asynchrony import Correction, cautions
from shoal.batch import Batch, Hold
from shoal.batchnorm import Group, synchronise
from shoal.collectives import Collectives
from shoal.connection import connected
from shoal.data import Loader
from shoal.ema import checked_decay
from shoal.errors import UsageError
from shoal.evaluation import Evaluator
from shoal.events import Events
from shoal.exchange import Exchange
from shoal.files import Files
from shoal.leases import Lessor
from shoal.models import Described, describe, refuse_wrappers
from shoal.overlap import Forwards
from shoal.own import Own, OwnStepper
from shoal.parameters import Replica
from shoal.partition import Chunk, Plan, plan_for
from shoal.prepare import Stepper
from shoal.results import loggable, plain_number, plain_value
from shoal.rows import Content, changed_rows
from shoal.site import Membership, Site
from shoal.start import start_of
from shoal.topology import Member
from shoal.updater import is_elementwise, refuse_gradients, resolve, spec_of
from shoal.waiting import Outcome
from shoal.wire import VERSION, Hello, OptimizerSpec, Pull

REPORT = 0.25  # seconds between two progress events at the least


class Prepared(NamedTuple):
    """What `prepare()` got and made of it, for those who look at a script."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    specs: Sequence[OptimizerSpec]
    plan: Plan
    loaders: Sequence[Loader]
    batch: Batch
    ema: float | None = None


class Training:
    """What a worker trains and how far it is.

    Args:
        events: where it reports.
    """

    def __init__(self, membership: Membership, site: Site, events: Events) -> None:
        self.membership = membership
        self.batch = Batch()
        self.loaders: list[Loader] = []
        self.iterations = 0
        self.logged: dict[str, Any] = {}
        self.left = self.settled = False
        self.stop_asked = self.stopping = False
        self.tracked: dict[str, Any] = {}
        self.probe: Callable[[Prepared], None] | None = None
        self._site, self._events = site, events
        self.collectives = Collectives(membership, site)
        self.models: Sequence[nn.Module] = ()
        self.evaluator = Evaluator(membership, site, self)
        self.files = Files(self)
        self._steppers: dict[int, Stepper | OwnStepper] = {}
        self._exchange: Exchange | None = None
        self._replica: Replica | None = None
        self._ema: float | None = None
        self._noted: set[str] = set()
        self._reported = 0.0
        self._closed, self._pid = False, os.getpid()
        self._began = self._ended = time.time()

    # The start.

    def prepare(self, objects: Sequence[Any], ema: float | None = None, overlap: bool = False) -> None:
        """Join the servers with these models and optimizers; what is neither passes through."""
        if self._exchange is not None:
            raise UsageError(
                "prepare() was called twice", remedy="give it all models and optimizers in one call"
            )
        self.models, self._ema = [o for o in objects if isinstance(o, nn.Module)], checked_decay(ema)
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        refuse_wrappers(self.models)
        if not optimizers:
            raise UsageError("prepare() got no optimizer", remedy="call run.prepare(model, optimizer)")
        m = self.membership
        described, specs = self._described(optimizers)
        plan = plan_for(m.topology, m.config.cluster, described.parameters, described.buffers)
        if self.probe is not None:
            self.probe(Prepared(self.models, optimizers, specs, plan, self.loaders, self.batch, ema))
        self._replica, exchange = connected(m, self._site, plan, described, optimizers, ema, self.note)
        first = m.member == Member("worker", 0, 0)
        checksum = self._replica.checksum()
        start = start_of(optimizers, self._replica) if first and not isinstance(exchange, Own) else None
        hello = Hello(VERSION, described.parameters, described.buffers, specs, checksum, ema)
        outcome, differs = exchange.join(hello, start, self._late())
        self.install(outcome)
        self._exchange = exchange
        if differs:
            self.note(
                "this worker's start differed from worker 0.0's, which is everyone's; a seed makes them equal"
            )
        for caution in cautions(m.topology, self.models, optimizers) if first else ():
            self.note(caution)
        for number, optimizer in enumerate(optimizers):
            self._adopt(number, optimizer)
        if overlap:
            self._overlap()
        synchronise(self.models, Group(self.collectives, self.batch))
        self._began = time.time()
        rank = m.topology.rank(m.member)
        if rank:  # so that dropout differs between workers; worker 0 stays as in plain PyTorch
            torch.manual_seed(torch.initial_seed() + rank)

    def _described(
        self, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Described, tuple[OptimizerSpec, ...]]:
        """The models and optimizers as the plan's input; raises UsageError for what cannot be trained."""
        config = self.membership.config
        allowed, correction = config.allow_optimizers, Correction.of(config.cluster)
        specs = tuple(spec_of(optimizer, allowed) for optimizer in optimizers)
        correction.refuse(specs)
        whole = [not is_elementwise(resolve(spec.name, allowed)) for spec in specs]
        described = describe(self.models, optimizers, whole)
        refuse_gradients(described.parameters, specs, allowed)
        correction.refuse_tables(described.parameters)
        return described, specs

    def _overlap(self) -> None:
        """Let forwards wait for new values, where those come from servers."""
        replica, _ = self.joined()
        steppers = [stepper for stepper in self._steppers.values() if isinstance(stepper, Stepper)]
        if steppers:
            forwards = Forwards(self.models, replica, [stepper.arrivals for stepper in steppers])
            for stepper in steppers:
                stepper.at_once = forwards.uncovered

    def _late(self) -> str:
        """Why this worker's start may be long in coming; "" where it may not."""
        steps = self.membership.config.cluster.warmup_steps
        if not steps or self.membership.member.group == 0:
            return ""
        return f"the start that worker group 0 makes in its first {steps} steps (cluster.warmup_steps)"

    def _adopt(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        replica, exchange = self.joined()
        workers = self.membership.topology.workers_per_group
        stepper: Stepper | OwnStepper
        if isinstance(exchange, Own):
            stepper = OwnStepper(number, optimizer, replica, exchange, self)
        else:
            stepper = Stepper(number, optimizer, replica, exchange, workers, self)
        self._steppers[number] = stepper
        adopt(optimizer, stepper, self.note)

    def joined(self) -> tuple[Replica, Exchange]:
        """See evaluation.Trained.joined."""
        if self._replica is None or self._exchange is None:
            raise UsageError("nothing is prepared yet", remedy="call run.prepare(model, optimizer) first")
        return self._replica, self._exchange

    def asked(self, ema: bool, together: int = 0) -> Pull:
        """See evaluation.Trained.asked."""
        if ema and self._ema is None:
            raise UsageError(
                "ema=True, and servers keep no moving averages",
                remedy="ask for them at the start: run.prepare(model, optimizer, ema=0.999)",
            )
        return Pull(together, ema)

    def lessor(self) -> Lessor:
        """Who leases blocks of data to this worker.

        Raises:
            UsageError: before prepare().
        """
        if self._exchange is None:
            raise UsageError(
                "a batch of leased data (cluster.data) was drawn before prepare(), and servers lease it",
                remedy="call run.prepare(model, optimizer) first",
            )
        return self._exchange

    def cursor(self) -> tuple[int, ...]:
        """The loaders' positions, for the commit."""
        return tuple(number for loader in self.loaders for number in (loader.epoch, loader.position))

    # Steps.

    def drawn(self, weight: int) -> None:
        """A loader hands a batch to the script."""
        self.iterations += 1
        self.batch.drawn(weight)

    def step_of(self, optimizer: int = 0) -> int:
        """The last step that an optimizer has taken."""
        return self._exchange.taken(optimizer) if self._exchange is not None else 0

    @property
    def current_step(self) -> int | None:
        """The step in progress, counted from 1; None before prepare()."""
        return None if self._exchange is None else self.step_of() + 1

    def stepped(self) -> None:
        """An optimizer's step is over."""
        self._ended = time.time()
        self.left = self.settled = False  # a step after a loop begins another one
        if self._ended - self._reported >= REPORT or not self._reported:
            self._reported = self._ended
            loss = self.logged.get("loss")
            self._events.write(
                "progress",
                step=self.step_of(),
                samples=self.batch.samples,
                loss=plain_number(loss),
                staleness=max(stepper.staleness for stepper in self._steppers.values()),
            )

    def clip_grad_norm_(self, max_norm: float, scaler: Any, optimizer: torch.optim.Optimizer | None) -> float:
        """See Run.clip_grad_norm_."""
        if not max_norm >= 0:
            raise UsageError(f"no gradient can have a norm of {max_norm}", remedy="give a number, 0 or more")
        return self._only("clip_grad_norm_", optimizer).clip_grad_norm_(max_norm, scaler)

    def clip_grad_value_(self, limit: float, optimizer: torch.optim.Optimizer | None) -> None:
        """See Run.clip_grad_value_."""
        if not limit >= 0:
            raise UsageError(f"no value can be within {limit} of 0", remedy="give a number, 0 or more")
        self._only("clip_grad_value_", optimizer).limit = limit

    def _only(self, call: str, optimizer: torch.optim.Optimizer | None) -> Stepper | OwnStepper:
        """The stepper of that optimizer, or of the only one."""
        self.joined()
        steppers = [s for s in self._steppers.values() if optimizer is None or s.drives(optimizer)]
        if len(steppers) != 1:
            what = f"{call} found {len(steppers)} optimizers to clip for"
            raise UsageError(what, remedy=f"name a prepared one: run.{call}(…, optimizer=optimizer)")
        return steppers[0]

    def wait(self) -> None:
        """See Run.wait."""
        for stepper in self._steppers.values():
            stepper.complete()

    def accumulate(self) -> Hold:
        """See Run.accumulate."""
        for stepper in self._steppers.values():
            stepper.forgive()
        return Hold(self.batch)

    @contextmanager
    def edit(self) -> Iterator[None]:
        """See Run.edit."""
        replica, exchange = self.joined()
        self.wait()
        self.collectives.gather(None)  # nobody's last values are still on their way
        with exchange.editing():
            before = replica.snapshot()
            yield
            if self.membership.member.index == 0:
                after = replica.snapshot()
                edited = {
                    c.number: _edited(c, before[c.number], after[c.number]) for c in replica.plan.chunks
                }
                exchange.edit({chunk: contents for chunk, contents in edited.items() if contents})
        self._remember()

    def report_result(self, value: Any) -> None:
        """Leave what the worker's function returned among its events."""
        try:
            self._events.write("result", value=plain_value(value))
        except TypeError as error:
            raise UsageError(
                f"the function's result cannot be sent to the launcher ({error})",
                remedy="return numbers, text, lists or dicts of them",
            ) from None

    def note(self, message: str) -> None:
        """Tell the user something, once."""
        if message not in self._noted:
            self._noted.add(message)
            self._events.write("note", message=message)

    def log(self, values: dict[str, Any]) -> None:
        """See Run.log."""
        for name, value in values.items():
            self.logged[name] = loggable(name, value)

    # The end of a loop.

    def begin_loop(self) -> None:
        """A loop begins; after an earlier one all groups first reach its end."""
        self.settle()
        self.left = self.settled = False
        self.stop_asked = self.stopping = False
        for stepper in self._steppers.values():
            stepper.stop = False

    def end_loop(self) -> None:
        """A loop has ended: others no longer wait for this worker."""
        if self._exchange is not None and not self.left and os.getpid() == self._pid:
            if not any(stepper.broken for stepper in self._steppers.values()):
                self.wait()
            self.joined()[0].settle()
            self.left = True
            self._exchange.leave()

    def settle(self) -> None:
        """Have all new values in the model; after a loop wait for all groups, then hold the common end."""
        self.wait()
        if self.left and not self.settled:
            _, exchange = self.joined()
            exchange.settle()
            self.install(exchange.pull())
            self.settled = True

    def install(self, outcome: Outcome, pending: Mapping[int, set[int]] | None = None) -> None:
        """See evaluation.Trained.install."""
        if self._replica is None:
            return
        for number, values in outcome.values.items():
            if values is not None:
                self._replica.install(self._replica.plan.chunks[number], values)
        self._replica.settle()
        self._remember(pending)

    def pending(self) -> dict[int, set[int]]:
        """See evaluation.Trained.pending."""
        return {number: stepper.pending() for number, stepper in self._steppers.items()}

    def _remember(self, pending: Mapping[int, set[int]] | None = None) -> None:
        for number, stepper in self._steppers.items():
            stepper.remember(self.step_of(number) + 1, (pending or {}).get(number, ()))

    def close(self) -> None:
        """Leave, wait until everyone's updates are everywhere, report, say goodbye; once."""
        if self._exchange is None or self._closed or os.getpid() != self._pid:  # a fork of the script's own
            return
        self.end_loop()
        if not self.settled:
            self._exchange.settle()
        self._events.write(
            "finished",
            steps=self.step_of(),
            samples=self.batch.samples,
            pushed=self._exchange.pushed,
            resent=self._exchange.resent,
            traffic=dict(self._exchange.traffic),
            final={name: plain_number(value) for name, value in self.logged.items()},
            began=self._began,
            ended=self._ended,
        )
        self._closed = True
        self._exchange.close()
        self.joined()[0].close()


def _edited(chunk: Chunk, before: Tensor, after: Tensor) -> tuple[Content, ...]:
    """What the servers have to know of a chunk (flat) that the script has changed; nothing if it has not."""
    if torch.equal(after, before):
        return ()
    return changed_rows(before, after, chunk.row) if chunk.row else (after,)
