"""The fork server, and the launcher's hold on it.

It imports torch once, runs none of it, and forks every member from that. Started as ``python -m
shoal.launcher.forkserver CHANNEL LIFELINE PRIVATE``: the descriptors of its end of the socket pair and of the
lifeline's reading end, and the run's private directory. When the launcher is gone both read their
end: the fork server kills what it has forked, removes the private directory and ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Self

from shoal.launcher import kill_group
from shoal.launcher.messages import Channel, Exited, Forked, Kill, Message, Ready, Spawn, Stop
from shoal.launcher.process import ForkProcess

# torch._dynamo comes with the first optimizer that is made, so every script needs it.
IMPORTS = (
    "numpy",
    "zmq",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "shoal.session",
    "shoal.launcher.member",
    "shoal.launcher.torchrun",  # where shoal.init is
)


def main() -> None:
    """Serves one launcher until it is gone."""
    channel, lifeline, private = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, which is not on the path of ``python train.py``
    server = ForkServer(Channel(socket.socket(fileno=channel)), lifeline)
    try:
        if _imported(lifeline):
            with suppress(ConnectionError):
                server.run()
    finally:
        server.kill()
    shutil.rmtree(private, ignore_errors=True)  # not after an error: the launcher is there and reads the log


def _imported(lifeline: int) -> bool:
    """Imports everything; False when the launcher ended meanwhile."""
    ended = select.poll()
    ended.register(lifeline, select.POLLIN)
    gc.disable()  # looking for garbage among half a million objects that stay costs a quarter of the time
    for name in IMPORTS:
        importlib.import_module(name)
        if ended.poll(0):
            return False
    gc.freeze()  # and in a member it would copy every page that the members share
    return True


class ForkServer:
    """Forks members, passes signals on, and says who has ended."""

    def __init__(self, channel: Channel, lifeline: int) -> None:
        self._channel, self._lifeline = channel, lifeline
        self._members: dict[int, str] = {}
        self._bell = socket.socketpair()
        for end in self._bell:
            end.setblocking(False)

    def run(self) -> None:
        """Obeys the launcher until it closes its end."""
        bell, ringer = self._bell
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(bell, selectors.EVENT_READ)
        selector.register(self._channel, selectors.EVENT_READ)
        self._channel.send(Ready())
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if bell in ready:
                bell.recv(4096)
                self._reap()
            if self._channel in ready and not self._obey():
                return

    def kill(self) -> None:
        """Kills every member that is left, with all its children."""
        for pid in self._members:
            kill_group(pid)

    def _obey(self) -> bool:
        messages = self._channel.receive()
        for message in messages or ():
            match message:
                case Spawn():
                    self._fork(message)
                case Stop():
                    for pid in self._members:
                        os.kill(pid, signal.SIGTERM)
                case Kill():
                    self.kill()
                case _:
                    raise RuntimeError(f"the fork server cannot obey {message}")
        return messages is not None

    def _fork(self, spawn: Spawn) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(spawn, parent)
        self._members[pid] = spawn.member
        self._channel.send(Forked(spawn.member, pid))

    def _become(self, spawn: Spawn, parent: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (*self._bell, self._channel):
                end.close()
            gc.enable()
            member = importlib.import_module("shoal.launcher.member")
            member.become(spawn, self._lifeline, parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # the fork server's own stack must not unwind here: its end kills the siblings

    def _reap(self) -> None:
        while self._members:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # What the member has started goes with it; until it is reaped nobody else can have its number.
            kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if name := self._members.pop(ended.si_pid, None):
                self._channel.send(Exited(name, os.waitstatus_to_exitcode(status), time.time()))


class Team:
    """The members' processes, through the fork server. Leaving the context ends all of them."""

    def __init__(self, process: ForkProcess) -> None:
        self._process, self.private, self.log = process, process.private, process.log
        self._pids: dict[str, int] = {}
        self._channel = Channel(process.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._pids.values():
            kill_group(pid)
        self._process.kill()

    def fileno(self) -> int:
        """For selectors."""
        return self._channel.fileno()

    def send(self, order: Message) -> None:
        """Sends an order, if the fork server is there; :meth:`receive` says when it is not."""
        with suppress(OSError):
            self._channel.send(order)

    def receive(self) -> list[Message] | None:
        """The fork server's messages; ``None`` when it has ended."""
        messages = self._channel.receive()
        for message in messages or ():
            match message:
                case Forked():
                    self._pids[message.member] = message.pid
                case Exited():
                    del self._pids[message.member]
        return messages


if __name__ == "__main__":
    main()
