"""One worker's training from prepare() to the end: what stands behind `run`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.adoption import adopt
from shoal.asynchrony import Correction, cautions
from shoal.batch import Batch, Hold
from shoal.collectives import Collectives
from shoal.data import Loader
from shoal.errors import UsageError
from shoal.evaluation import Shared, loggable, plain_number, plain_value
from shoal.events import Events
from shoal.exchange import Exchange
from shoal.parameters import Replica, as_bytes, describe, named_models, plain_name, refuse_wrappers
from shoal.partition import Chunk, Plan, make_plan
from shoal.prepare import Stepper
from shoal.rows import Content, changed_rows, cut_state
from shoal.site import Membership, Site
from shoal.topology import Member
from shoal.transport import Post
from shoal.updater import is_elementwise, pack, refuse_gradients, resolve, spec_of
from shoal.waiting import Outcome
from shoal.wire import VERSION, Frame, Hello, OptimizerSpec, State

REPORT = 0.25  # seconds between two progress events at the least


class Prepared(NamedTuple):
    """What `prepare()` got and made of it, for those who look at a script."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    specs: Sequence[OptimizerSpec]
    plan: Plan
    loaders: Sequence[Loader]
    batch: Batch


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
        self._shared = Shared(membership, site)
        self._models: list[nn.Module] = []
        self._steppers: dict[int, Stepper] = {}
        self._exchange: Exchange | None = None
        self._replica: Replica | None = None
        self._evaluations: Counter[str] = Counter()
        self._noted: set[str] = set()
        self._reported = 0.0
        self._closed, self._pid = False, os.getpid()
        self._began = self._ended = time.time()

    # The start.

    def prepare(self, objects: Sequence[Any]) -> None:
        """Join the servers with these models and optimizers; what is neither passes through."""
        if self._exchange is not None:
            raise UsageError(
                "prepare() was called twice", remedy="give it all models and optimizers in one call"
            )
        self._models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        refuse_wrappers(self._models)
        if not optimizers:
            raise UsageError("prepare() got no optimizer", remedy="call run.prepare(model, optimizer)")
        m = self.membership
        allowed = m.config.allow_optimizers
        specs = tuple(spec_of(optimizer, allowed) for optimizer in optimizers)
        correction = Correction.of(m.config.cluster)
        correction.refuse(specs)
        whole = [not is_elementwise(resolve(spec.name, allowed)) for spec in specs]
        described = describe(self._models, optimizers, whole)
        refuse_gradients(described.parameters, specs, allowed)
        correction.refuse_tables(described.parameters)
        groups = m.topology.server_groups if m.topology.synchronised else 1
        plan = make_plan(
            described.parameters,
            described.buffers,
            m.topology.servers_per_group,
            groups,
            m.config.cluster.slicer,
        )
        if self.probe is not None:
            self.probe(Prepared(self._models, optimizers, specs, plan, self.loaders, self.batch))
        self._replica = Replica(plan, described.tensors, described.places)
        post = Post(self._site.endpoint(), m.run_id, m.incarnation)
        exchange = Exchange(m.member, m.topology, post, plan, m.config.timeouts, self._site.check)
        hello = Hello(VERSION, described.parameters, described.buffers, specs, self._replica.checksum())
        outcome, differs = exchange.join(hello, self._start(optimizers), self._late())
        self._install(outcome)
        self._exchange = exchange
        if differs:
            self.note(
                "this worker's start differed from worker 0.0's, which is everyone's; a seed makes them equal"
            )
        if m.member == Member("worker", 0, 0):
            for caution in cautions(m.topology, self._models, optimizers):
                self.note(caution)
        for number, optimizer in enumerate(optimizers):
            self._adopt(number, optimizer)
        self._began = time.time()
        rank = m.topology.rank(m.member)
        if rank:  # so that dropout differs between workers; worker 0 stays as in plain PyTorch
            torch.manual_seed(torch.initial_seed() + rank)

    def _start(
        self, optimizers: Sequence[torch.optim.Optimizer]
    ) -> dict[int, tuple[list[State], list[Frame]]]:
        """Worker 0.0's values and optimizer state by chunk; nothing elsewhere."""
        replica = self._replica
        if replica is None or self.membership.member != Member("worker", 0, 0):
            return {}
        start: dict[int, tuple[list[State], list[Frame]]] = {}
        for chunk in replica.plan.chunks:
            states = [_cut(optimizers[chunk.optimizer], replica, chunk, i) for i in range(len(chunk.pieces))]
            entries, frames = pack(iter(states))
            start[chunk.number] = entries, [as_bytes(replica.read(chunk)), *frames]
        return start

    def _late(self) -> str:
        """Why this worker's start may be long in coming; "" where it may not."""
        steps = self.membership.config.cluster.warmup_steps
        if not steps or self.membership.member.group == 0:
            return ""
        return f"the start that worker group 0 makes in its first {steps} steps (cluster.warmup_steps)"

    def _adopt(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        replica, exchange = self._joined()
        workers = self.membership.topology.workers_per_group
        stepper = Stepper(number, optimizer, replica, exchange, workers, self)
        self._steppers[number] = stepper
        adopt(optimizer, stepper, self.note)

    def _joined(self) -> tuple[Replica, Exchange]:
        if self._replica is None or self._exchange is None:
            raise UsageError("nothing is prepared yet", remedy="call run.prepare(model, optimizer) first")
        return self._replica, self._exchange

    def cursor(self) -> tuple[int, ...]:
        """The loaders' positions, for the commit."""
        return tuple(number for loader in self.loaders for number in (loader.epoch, loader.position))

    # Steps.

    def drawn(self, weight: int) -> None:
        """A loader hands a batch to the script."""
        self.iterations += 1
        self.batch.drawn(weight)

    def step_of(self, optimizer: int = 0) -> int:
        """The last finished step of an optimizer."""
        return self._exchange.steps[optimizer] if self._exchange is not None else 0

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
        self._joined()
        steppers = [s for s in self._steppers.values() if optimizer is None or s.drives(optimizer)]
        if len(steppers) != 1:
            raise UsageError(
                f"clip_grad_norm_ found {len(steppers)} optimizers to clip for",
                remedy="name a prepared one: run.clip_grad_norm_(max_norm, optimizer=optimizer)",
            )
        return steppers[0].clip_grad_norm_(max_norm, scaler)

    def accumulate(self) -> Hold:
        """See Run.accumulate."""
        for stepper in self._steppers.values():
            stepper.forgive()
        return Hold(self.batch)

    @contextmanager
    def edit(self) -> Iterator[None]:
        """See Run.edit."""
        replica, exchange = self._joined()
        self.collectives.gather(None)  # nobody's last values are still on their way
        before = replica.snapshot()
        yield
        if self.membership.member.index == 0:
            after = replica.snapshot()
            edited = {c.number: _edited(c, before[c.number], after[c.number]) for c in replica.plan.chunks}
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

    def end_loop(self) -> None:
        """A loop has ended: others no longer wait for this worker."""
        if self._exchange is not None and not self.left:
            self.left = True
            self._exchange.leave()

    def settle(self) -> None:
        """After a loop: wait for all groups, then hold the common end."""
        if self.left and not self.settled:
            _, exchange = self._joined()
            exchange.settle()
            self._install(exchange.pull())
            self.settled = True

    def _install(self, outcome: Outcome) -> None:
        if self._replica is None:
            return
        for number, values in outcome.values.items():
            if values is not None:
                self._replica.install(self._replica.plan.chunks[number], values)
        self._remember()

    def _remember(self) -> None:
        for number, stepper in self._steppers.items():
            stepper.remember(self.step_of(number) + 1)

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

    # Evaluation and files.

    def evaluate(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """See Run.evaluate."""
        replica, exchange = self._joined()
        topology, member = self.membership.topology, self.membership.member
        whose = "all" if self.left else str(member.group)  # groups may have evaluated more or less often
        self._evaluations[whose] += 1
        key = f"evaluate/{whose}/{self._evaluations[whose]}"
        if self.left:
            self.settle()
            alone = len(topology.workers) == 1
            ours = topology.rank(member) == 0
            return self._shared.compute(key, lambda: function(*args, **keywords), ours=ours, alone=alone)

        def present() -> Any:
            own = replica.snapshot()
            self._install(exchange.pull(present=True))
            try:
                return function(*args, **keywords)
            finally:
                self._install(Outcome(dict(own)))

        alone = topology.workers_per_group == 1
        return self._shared.compute(key, present, ours=member.index == 0, alone=alone)

    def state_dict(self) -> dict[str, Tensor]:
        """See Run.state_dict."""
        replica, exchange = self._joined()
        self.settle()
        values: dict[int, Content] = {**replica.snapshot()}
        if not self.left:
            pulled = exchange.pull(present=True).values
            values |= {number: flat for number, flat in pulled.items() if flat is not None}
        current = replica.build(values)
        found: dict[str, Tensor] = {}
        for prefix, model in named_models(self._models):
            for name, tensor in model.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    found[prefix + plain_name(name)] = current.get(tensor, tensor.detach()).clone()
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """See Run.save."""
        target = Path(path)
        if not target.parent.is_dir():
            raise UsageError(
                f"cannot save {target}: there is no folder {target.parent}", remedy="make it first"
            )
        partial = target.with_name(target.name + ".partial")
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, partial)
        os.replace(partial, target)


def _edited(chunk: Chunk, before: Tensor, after: Tensor) -> tuple[Content, ...]:
    """What the servers have to know of a chunk (flat) that the script has changed; nothing if it has not."""
    if torch.equal(after, before):
        return ()
    return changed_rows(before, after, chunk.row) if chunk.row else (after,)


def _cut(optimizer: torch.optim.Optimizer, replica: Replica, chunk: Chunk, index: int) -> dict[str, Any]:
    """A piece's part of the state that a worker's optimizer already has."""
    piece = chunk.pieces[index]
    tensor = replica.tensors[piece.parameter]
    whole = replica.plan.parameters[piece.parameter].whole
    state: dict[str, Any] = {}
    for key, value in optimizer.state.get(tensor, {}).items():
        if isinstance(value, Tensor) and value.shape == tensor.shape and not whole:
            value = cut_state(value, piece, chunk.row)
        state[key] = value
    return state
