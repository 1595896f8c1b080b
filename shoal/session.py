"""`shoal.init()`: which run is this process part of, and who serves it."""

from __future__ import annotations

import atexit
import contextvars
import random
import secrets
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.beside import Beside
from shoal.collectives import Collectives
from shoal.config import Cluster, Config, load
from shoal.errors import UsageError
from shoal.events import Events
from shoal.run import Run
from shoal.server import Server
from shoal.site import Membership, OneProcess, Site
from shoal.topology import Topology
from shoal.training import Prepared
from shoal.transport import Post
from shoal.transport.inprocess import Hub

__all__ = [
    "Membership",
    "Run",
    "attach",
    "attach_probe",
    "attached",
    "current_step",
    "finish",
    "init",
    "serve",
]

# Which run is this process, or this thread, part of?

_thread: contextvars.ContextVar[Run | None] = contextvars.ContextVar("run", default=None)
_place: tuple[Membership, Site, Events] | None = None
_run: Run | None = None


def init(cluster: str | Cluster | None = None, *, seed: int | None = None) -> Run:
    """The run that this process belongs to.

    Under `shoal run` the launcher's cluster block holds. Under plain `python` there is one worker and one
    server, in this process.

    Args:
        cluster: a preset, a file or a block, where no launcher gives one: it must then be a single worker's.
        seed: for torch, numpy and random, where no launcher gives one.

    Raises:
        UsageError: a cluster of several members under plain `python`.
        ConfigError: a block that cannot be run.
    """
    global _run
    if (run := _thread.get() or _run) is not None:
        return run
    if _place is not None:
        _run = Run(*_place)
    else:
        _run = _alone(cluster, seed)
        atexit.register(_run.close)
    return _run


def _alone(cluster: str | Cluster | None, seed: int | None) -> Run:
    """One worker and one server in this process."""
    config = load(cluster) if isinstance(cluster, str) else Config(cluster=cluster or Cluster())
    topology = Topology.of(config.cluster)
    if len(topology.workers) + len(topology.servers) > 2:
        raise UsageError(
            f"a {topology.framework} cluster has {len(topology.workers)} workers and {len(topology.servers)} "
            "servers, and plain python starts neither",
            remedy="start the script with: shoal run --cluster FILE_OR_PRESET script.py",
        )
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
        seed_everything(seed)
    private = Path(tempfile.gettempdir())
    worker, server = topology.workers[0], topology.servers[0]
    run_id, hub = secrets.token_hex(16), Hub()
    site = OneProcess(hub, worker.name)
    beside = Beside() if topology.paired(worker) else None
    member = Server(
        server,
        topology,
        config,
        Post(OneProcess(hub, server.name).endpoint(), run_id),
        Events(None, server.name),
        beside=beside,
    )
    threading.Thread(target=site.guard(member.serve), name=server.name, daemon=True).start()
    membership = Membership(config, topology, worker, run_id, None, private, beside=beside)
    return Run(membership, site, Events(None, worker.name))


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


# For the launcher, and for clusters of threads.


def in_thread(run: Run) -> None:
    """Make `shoal.init()` in this thread return this run."""
    _thread.set(run)


def attach(membership: Membership, site: Site, events: Events) -> None:
    """Make `shoal.init()` in this process return this worker's run."""
    global _place
    _place = membership, site, events


def attached() -> bool:
    """Whether it is known already which run this process, or this thread, is part of."""
    return (_thread.get() or _run or _place) is not None


def attach_probe(probe: Callable[[Prepared], None], config: Config | None = None) -> None:
    """Make `shoal.init()` return a run that shows `probe` what the script prepares, before it joins servers.

    Args:
        config: the run is that of worker 0.0 of this cluster, where nobody else is: `probe` must end the
            script. None: a run of one worker and one server, which goes on.
    """
    global _run
    if config is None:
        run = init()
    else:
        topology = Topology.of(config.cluster)
        worker = topology.workers[0]
        site = OneProcess(Hub(), worker.name)
        membership = Membership(config, topology, worker, "probe", None, Path())
        run = _run = Run(membership, site, Events(None, worker.name))
        alone = replace(membership, topology=Topology.of(Cluster()))  # a barrier before prepare() is passed
        run._training.collectives = Collectives(alone, site)
    run._training.probe = probe


def current_step() -> int | None:
    """The step this process's worker is at, counted from 1; None before it has prepared anything."""
    run = _thread.get() or _run
    return run._training.current_step if run is not None else None


def report(value: Any) -> None:
    """Leave a function's result among this worker's events."""
    run = init()
    run._training.report_result(value)


def finish() -> None:
    """The script has ended: leave, wait for the last sync, report, say goodbye.

    Raises:
        UsageError: the script never called shoal.init() or never prepared anything; others would wait for it.
    """
    run = _thread.get() or _run
    if run is None or run._training.current_step is None:
        raise UsageError(
            "the script ended without training anything",
            remedy="call run = shoal.init() and run.prepare(model, optimizer), or start it with plain python",
        )
    run.close()


def serve(membership: Membership, site: Site, events: Events) -> None:
    """Run one server member until its workers have stopped."""
    m = membership
    post = Post(site.endpoint(), m.run_id, m.incarnation)
    Server(m.member, m.topology, m.config, post, events, m.schedules, m.beside).serve()
    post.close()
