"""Ranks as torchrun starts them, at the price of forks: one process imports torch once, then forks them all.

Run as a script it reads orders from its input, a JSON list of ranks a line: "env" is added to the
environment, "argv" is the script and its arguments, "log" gets what it prints, "namespace" is the network
to be on, if any. It writes the ranks' process numbers, and a line for each that has ended: place and status.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000


class Forker:
    """The process that forks; a context."""

    def __enter__(self) -> Forker:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def start(self, orders: Sequence[Mapping[str, Any]]) -> Ranks:
        """Start ranks; only one batch at a time."""
        print(json.dumps(list(orders)), file=self._process.stdin, flush=True)
        return Ranks(self, json.loads(self.line()))

    def line(self) -> str:
        """What the process says next."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class Ranks:
    """Ranks that run; a context that leaves none of them behind."""

    def __init__(self, forker: Forker, pids: list[int]) -> None:
        self.pids = pids
        self._ended: dict[int, int] = {}
        self._forker = forker

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self._ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.statuses()

    def ended(self) -> Iterator[tuple[int, int]]:
        """Number and exit status of each rank (minus a signal), as they end."""
        while len(self._ended) < len(self.pids):
            rank, status = map(int, self._forker.line().split())
            self._ended[rank] = status
            yield rank, status

    def statuses(self) -> list[int]:
        """Every rank's exit status, once all have ended."""
        for _ in self.ended():
            pass
        return [status for _, status in sorted(self._ended.items())]


def ranks_of(
    count: int, script: Path, *args: str, folder: Path, port: int, hosts: Sequence[tuple[str, int]] = ()
) -> list[dict[str, Any]]:
    """Orders for `count` ranks.

    Args:
        folder: for the logs, rank0.log and so on.
        port: of the store through which they find each other.
        hosts: for each machine its network namespace and how many ranks it has; none = all are here.
    """
    found = []
    for rank in range(count):
        before = [sum(size for _, size in hosts[:i]) for i in range(len(hosts) + 1)]
        host = next((i for i in range(len(hosts)) if before[i] <= rank < before[i + 1]), None)
        local, size = (rank, count) if host is None else (rank - before[host], hosts[host][1])
        env = {
            "RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1" if host is None else "10.99.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        found.append(
            {
                "env": {name: str(value) for name, value in env.items()},
                "argv": [str(script), *args],
                "log": str(folder / f"rank{rank}.log"),
                "namespace": None if host is None else hosts[host][0],
            }
        )
    return found


def main() -> None:
    """Start what the input asks for, and wait for all of it."""
    import torch._dynamo  # noqa: F401

    import shoal.launcher.torchrun  # noqa: F401

    for line in sys.stdin:
        children = {}
        for number, order in enumerate(json.loads(line)):
            pid = os.fork()
            if pid == 0:
                _be(order)
            children[pid] = number
        print(json.dumps(list(children)), flush=True)
        while children:
            pid, status = os.wait()
            print(children.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def _be(order: Mapping[str, Any]) -> None:
    """Be this rank, and end as Python would."""
    from shoal.launcher.member import run_script

    os.environ.update(order["env"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target in (1, 2):
        os.dup2(log, target)
    if order["namespace"]:
        with open(f"/run/netns/{order['namespace']}") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    script, *args = order["argv"]
    status = 0
    try:
        run_script(script, args)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
