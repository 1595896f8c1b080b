"""A process that torchrun has started: which member it is, and what it does from `shoal.init()` to its end.

Ranks are workers in order, then separate servers. In a worker's rank `init()` starts the servers beside it
and returns the run; in a server's rank it serves, and ends the process with status 0.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec

import shoal
from shoal import session
from shoal.beside import Beside
from shoal.config import Cluster, Config, load
from shoal.errors import LaunchError, ShoalError, UsageError
from shoal.events import Event, Events
from shoal.launcher import CONFIGURATION, FAILED, environment
from shoal.launcher.environment import Place
from shoal.launcher.hints import Hints
from shoal.launcher.line import suited
from shoal.launcher.local import processes
from shoal.launcher.meeting import meeting
from shoal.launcher.member import run_script, user_traceback
from shoal.run import Run
from shoal.rundir import RunDir, fresh
from shoal.site import Membership, Site, wait_for
from shoal.summary import Outcome, Times, summarise, write
from shoal.topology import Member, Topology, machines_of


def init(cluster: str | Cluster | None = None, *, seed: int | None = None) -> Run:
    """The run that this process belongs to.

    Under `shoal run` the launcher's cluster block holds; under `torchrun` that of `shoal run --cluster`, of
    the environment's SHOAL_CLUSTER, or this one, whichever is there first. A process that torchrun has
    started as a server does not return from here: it serves, then ends with status 0. Under plain `python`
    there is one worker and one server, in this process.

    Args:
        cluster: a preset, a file or a block, where no launcher gives one; under plain `python` it must be a
            single worker's.
        seed: for torch, numpy and random, where no launcher gives one.

    Raises:
        UsageError: a cluster of several members under plain `python`.
        ConfigError: a block that cannot be run.
        LaunchError: under torchrun, when the other processes do not come.
    """
    place = None if session.attached() else environment.place()
    block = environment.cluster() or cluster
    if place is not None and (place.world_size > 1 or block is not None):
        try:
            config = _configured(block, seed)
            rank = Rank(place, config, environment.run_dir())
        except ShoalError as error:
            refuse(place, error)
        rank.begin()
    return session.init(cluster, seed=seed)


def run(place: Place, config: Config, script: str, args: list[str], run_dir: Path | None) -> NoReturn:
    """`shoal run`, started by torchrun: be this rank of the run that the others make up with it.

    Raises:
        SystemExit: with the rank's exit status.
    """
    try:
        wanted = run_dir or environment.run_dir() or fresh(config.cluster.workspace)
        rank = Rank(place, config, wanted)
    except ShoalError as error:
        refuse(place, error)
    rank.begin()
    try:
        run_script(script, args)
        session.finish()
    except Exception as error:
        rank.failed(error)
        print(user_traceback(error), end="", file=sys.stderr, flush=True)
        raise SystemExit(FAILED) from None
    raise SystemExit(0)


def _configured(block: str | Cluster | None, seed: int | None) -> Config:
    """The configuration of a script that is a rank itself."""
    if block is None:
        raise UsageError(
            "torchrun has started several processes, and nothing says which cluster they are",
            remedy="set SHOAL_CLUSTER=NAME_OR_FILE, write shoal.init(cluster=...), or start the script with "
            "torchrun ... -m shoal run --cluster NAME_OR_FILE script.py",
        )
    config = load(block) if isinstance(block, str) else Config(cluster=block)
    return config if seed is None else config.model_copy(update={"seed": seed})


def refuse(place: Place, error: ShoalError) -> NoReturn:
    """Say what is wrong, once on each machine: torchrun ends the others as soon as one of them ends.

    Raises:
        SystemExit: with the status of a mistake in the configuration.
    """
    if not place.hosted:  # nobody ends the others
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(CONFIGURATION)
    spoken = f"refused/{place.attempt}/{place.rank - place.local_rank}"
    try:
        hints = Hints(place, Config().timeouts.start)
        if place.local_rank == 0:
            print(error, file=sys.stderr, flush=True)
            hints.leave(spoken, "said")
        hints.find(spoken, "what is wrong")
    except LaunchError:
        print(error, file=sys.stderr, flush=True)
    raise SystemExit(CONFIGURATION)


class Rank:
    """One process: a worker with the servers beside it, or a server.

    Args:
        run_dir: where the run writes; None = where the block says, or nowhere.

    Raises:
        UsageError: torchrun has started more or fewer processes than the block has.
        ConfigError: the block's hosts are not where all of its members are.
        LaunchError: there is no secret, or no address that others reach.
    """

    def __init__(self, place: Place, config: Config, run_dir: Path | None) -> None:
        self._place, self._config, self._wanted = place, config, run_dir
        self._topology = Topology.of(config.cluster)
        members = processes(self._topology)
        if len(members) != place.world_size:
            servers = len(members) - len(self._topology.workers)
            raise UsageError(
                f"torchrun has started {place.world_size} processes, and this cluster block has "
                f"{len(members)}: {len(self._topology.workers)} workers and {servers} separate servers",
                remedy=f"start {len(members)} processes over all machines, as in torchrun "
                f"--nproc-per-node={len(members)} on one",
            )
        machines_of(config.cluster.hosts, self._topology)
        self._member = members[place.rank]
        self._ended: dict[str, Event] = {}
        self._threads: list[threading.Thread] = []
        self._beside = Beside()
        self._failed = False
        self._pid, self._started = os.getpid(), time.time()
        self._meeting = meeting(place, config, self._topology)

    def begin(self) -> None:
        """Find the others. Returns in a worker; a server serves, then ends the process.

        Raises:
            LaunchError: the others do not come.
            SystemExit: with status 0, when a server's workers have stopped.
        """
        self._meeting.join(self._wanted)
        cluster = suited(self._config.cluster, self._topology, self._meeting.line_rate)
        self._config = self._config.model_copy(update={"cluster": cluster})
        self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        atexit.register(self._end)
        membership, site, events = self._seat(self._member)
        events.write("started", pid=os.getpid(), incarnation=membership.incarnation)
        if self._member.role == "server":
            session.serve(membership, site, events)
            raise SystemExit(0)
        self._threads = [
            threading.Thread(target=self._serve_beside, args=(server,), name=server.name, daemon=True)
            for server in self._topology.servers
            if self._topology.host_of(server) == self._member
        ]
        for thread in self._threads:
            thread.start()
        session.attach(membership, site, events)
        session.seed_everything(self._config.seed)

    def _seat(self, member: Member) -> tuple[Membership, Site, Events]:
        record = self._meeting.record
        run_dir = Path(record.run_dir) if record.run_dir else None
        membership = Membership(
            config=self._config,
            topology=self._topology,
            member=member,
            run_id=record.run_id,
            run_dir=run_dir,
            private=self._meeting.private,
            local_rank=self._place.local_rank,
            line_rate=self._meeting.line_rate,
            beside=self._beside if self._topology.paired(member) else None,
        )
        path = RunDir(run_dir).events(member) if run_dir else None
        return membership, self._meeting.site(membership), Events(path, member.name, self._tell)

    def _tell(self, event: Event) -> None:
        """Keep what the end of the run needs; show what a user should know."""
        if event["event"] == "note":
            print(f"{event['member']}: {event['message']}", file=sys.stderr, flush=True)
        elif event["event"] == "finished":
            self._ended[event["member"]] = event

    def _serve_beside(self, server: Member) -> None:
        membership, site, events = self._seat(server)
        events.write("started", pid=os.getpid(), incarnation=membership.incarnation)
        try:
            session.serve(membership, site, events)
        except BaseException as error:
            self._fail(server, error)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)  # at once: the worker may be deep in a computation that nothing else ends

    def failed(self, error: BaseException) -> None:
        """The script has failed: the process ends without a word to the servers."""
        self._failed = True
        self._fail(self._member, error)

    def _fail(self, member: Member, error: BaseException) -> None:
        step = f" at step {session.current_step()}" if member.role == "worker" else ""
        what = error.what if isinstance(error, ShoalError) else str(error)
        self._meeting.fail(f"{member} failed{step}: {type(error).__name__}: {what}")

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed(error)
        self._excepthook(kind, error, trace)

    def _end(self) -> None:
        """The process ends: leave in good order, if it has not failed."""
        if os.getpid() != self._pid:
            return
        try:
            if not self._failed:
                if self._member.role == "worker":
                    session.finish()
                for thread in self._threads:
                    thread.join()
                self._part()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)  # an exit function that raises would leave the status at 0
        finally:
            self._meeting.leave()

    def _part(self) -> None:
        """Tell the others that this process has ended well; rank 0 waits for all, and writes the summary."""
        membership, site, _ = self._seat(self._member)
        store = site.store()
        store.set(f"ended/{self._member}", msgspec.json.encode(self._ended).decode())
        if self._place.rank > 0:
            return
        ended: dict[str, Event] = {}
        for member in processes(self._topology):
            what = f"{member} to end"
            word = wait_for(store, f"ended/{member}", membership, "finish", what, site.check)
            ended |= msgspec.json.decode(word)
        if membership.run_dir is not None:
            events = {Member.parse(name): [event] for name, event in ended.items()}
            times = Times(self._started, time.time() - self._started)
            outcome = Outcome("finished")
            summary = summarise(self._config, self._topology, events, outcome, times, shoal.__version__)
            write(RunDir(membership.run_dir).summary, summary)
