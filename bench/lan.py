"""A small network on one machine: hosts out of network namespaces, on one switch, every interface shaped.

Needs Linux, root, and ``ip`` and ``tc`` of iproute2; traffic is shaped by tbf, both ways. The namespaces of a
network carry this process's number in their names, so several can be there at once; what a killed process has
left behind is removed when the next network is made.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from bench.errors import BenchError

PREFIX = "bench"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SHAPE = ("burst", "128kb", "latency", "50ms")

# Even flows: what is measured should be the program, not a fight between congestion controllers.
EVEN = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")

_numbers = itertools.count()


class Traffic(NamedTuple):
    """Bytes that an interface has received and sent, headers included."""

    received: int
    sent: int


def speed(rate: str) -> float:
    """Bytes per second of a rate as tc writes it, such as ``100mbit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if found is None:
        raise BenchError(f"{rate!r} is no rate: write 10mbit, 1gbit or the like")
    return float(found[1]) * UNITS[found[2]] / 8


class Lan:
    """Hosts 0, 1, … on one network, for as long as the context lasts.

    Args:
        rate: of every interface each way, as tc writes it; None = as fast as the machine is.
        even: reno, and no slow start after a pause; False = the system's own settings of TCP.
        rates: other rates, by host.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = "100mbit",
        even: bool = True,
        rates: Mapping[int, str] | None = None,
    ) -> None:
        self.hosts, self.rate, self.even = hosts, rate, even
        self.rates = {host: (rates or {}).get(host, rate) for host in range(hosts)}
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        usable()
        sweep()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @staticmethod
    def address(host: int) -> str:
        """A host's address."""
        return f"10.99.0.{host + 1}"

    @staticmethod
    def interface(host: int) -> str:
        """The name of a host's interface."""
        return f"e{host}"

    def run(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host, in a session of its own; it is killed with the network."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *argv],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def bytes(self, host: int) -> Traffic:
        """What a host's interface has carried so far."""
        folder = f"/sys/class/net/{self.interface(host)}/statistics"
        read = ["cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes"]
        received, sent = _do("ip", "netns", "exec", self.namespace(host), *read).split()
        return Traffic(int(received), int(sent))

    def traffic(self) -> dict[int, Traffic]:
        """What all interfaces have carried so far, by host."""
        return {host: self.bytes(host) for host in range(self.hosts)}

    def reshape(self, host: int, rate: str) -> None:
        """Give a host's interface another rate."""
        self.rates[host] = rate
        self._shape(host, rate)

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self._name}-h{host}"

    @property
    def _switch(self) -> str:
        return f"{self._name}-sw"

    def _make(self) -> None:
        switch = self._switch
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "br0", "up")
        for number in range(self.hosts):
            host, here, there = self.namespace(number), self.interface(number), f"p{number}"
            _do("ip", "netns", "add", host)
            peer = ("type", "veth", "peer", "name", there, "netns", switch)
            _do("ip", "link", "add", here, "netns", host, *peer)
            _do("ip", "-n", switch, "link", "set", there, "master", "br0", "up")
            _do("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", here)
            for device in (here, "lo"):
                _do("ip", "-n", host, "link", "set", device, "up")
            if self.even:
                _do("ip", "netns", "exec", host, "sysctl", "-qw", *EVEN)
            if (rate := self.rates[number]) is not None:
                self._shape(number, rate)

    def _shape(self, host: int, rate: str) -> None:
        for namespace, device in ((self.namespace(host), self.interface(host)), (self._switch, f"p{host}")):
            _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *SHAPE)

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for namespace in _namespaces():
            if namespace.startswith(f"{self._name}-"):
                _delete(namespace)


def usable() -> None:
    """Raise BenchError, with the reason, where this machine cannot make a network."""
    missing = [program for program in ("ip", "tc", "sysctl") if shutil.which(program) is None]
    if missing:
        raise BenchError(f"a network needs {' and '.join(missing)}: install iproute2 and procps")
    if os.geteuid() != 0:
        raise BenchError(
            "a network of namespaces needs root: run this as root, or leave the LAN scenarios out"
        )


def sweep() -> None:
    """Remove what processes that are gone have left behind."""
    for namespace in _namespaces():
        owner = re.match(rf"{PREFIX}-(\d+)-", namespace)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _delete(namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.strip()]


def _delete(namespace: str) -> None:
    with suppress(BenchError):  # another run may sweep at the same time
        _do("ip", "netns", "delete", namespace)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
