"""One lane to one peer: what arrives is cut into messages, and what the kernel does not take at once waits.

A message on the wire: the number of frames (u64), each frame's size (u64), then the frames.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from shoal.transport import Lane
from shoal.wire import Frame

LIMIT = 1 << 36  # bytes in a message at most
MOST = 1 << 20  # frames in a message at most
GREETING = 1 << 10  # bytes in what somebody sends who has not said yet who he is
SCRATCH = 1 << 16  # bytes read at once; what is left of a larger frame is read into its place
WAKE = 1 << 16  # bytes of a large frame that are worth waking up for
GATHER = 256  # buffers handed to the kernel at once
SHORT = 1 << 12  # bytes that are sooner copied into one buffer than handed over in several
LEAD = 1 << 16  # bytes that a link may be ahead of others of its pace
STANDSTILL = 1.0  # seconds after which a link that does not move is not waited for
_COUNT = struct.Struct("<Q")


class Letter:
    """A message on its way out, and the token that says when the kernel has taken its last byte."""

    __slots__ = ("_some_left", "left", "turn", "views")

    def __init__(self, views: list[memoryview], turn: int, some_left: threading.Condition) -> None:
        self.views, self.turn, self.left = views, turn, False
        self._some_left = some_left

    def wait(self, timeout: float) -> bool:
        """See Token.wait."""
        with self._some_left:
            return self._some_left.wait_for(lambda: self.left, timeout)


class Inbox:
    """Cuts what a socket brings into messages.

    Attributes:
        limit: bytes that a message may have.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.limit = GREETING
        self._scratch = bytearray(SCRATCH)
        self._view = memoryview(self._scratch)
        self._from = self._to = 0
        self._frames: list[bytearray] = []
        self._at = self._filled = 0
        self._sleeps = link.family == socket.AF_INET
        self._asleep = 1  # bytes that must be there before the kernel says that there is something

    def read(self) -> Iterator[list[Frame]]:
        """The messages that are complete now; raises OSError once the peer has closed, or sends nonsense.

        One by one: the first, in which a peer says who he is, may raise the limit of the next.
        """
        try:
            taken = self._take()
        except BlockingIOError:
            return
        if not taken:
            raise ConnectionResetError("the peer has closed")
        while self._frames or self._start():
            if not self._fill():
                break
            frames, self._frames = self._frames, []
            yield [*frames]
        if self._sleeps:
            self._sleep()

    def _sleep(self) -> None:
        """Within a large frame be woken for large parts of it, not for every packet."""
        rest = len(self._frames[self._at]) - self._filled if self._frames else 1
        wanted = min(rest, WAKE) if rest > WAKE // 8 else 1
        if wanted != self._asleep:
            self._asleep = wanted
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _take(self) -> int:
        """Read once from the socket: what is left of a large frame into its place, else into the scratch."""
        if self._from == self._to:
            self._from = self._to = 0
            if self._frames:
                rest = memoryview(self._frames[self._at])[self._filled :]
                if len(rest) >= SCRATCH:
                    taken = self._link.recv_into(rest)
                    self._filled += taken
                    return taken
        elif self._to == len(self._scratch):  # an incomplete prefix stands at the end
            left = self._to - self._from
            self._view[:left] = bytes(self._view[self._from : self._to])
            self._from, self._to = 0, left
        taken = self._link.recv_into(self._view[self._to :])
        self._to += taken
        return taken

    def _fill(self) -> bool:
        """Copy from the scratch into the frames that are open; True once all are full."""
        while self._at < len(self._frames):
            frame = self._frames[self._at]
            part = min(len(frame) - self._filled, self._to - self._from)
            frame[self._filled : self._filled + part] = self._view[self._from : self._from + part]
            self._from, self._filled = self._from + part, self._filled + part
            if self._filled < len(frame):
                return False
            self._at, self._filled = self._at + 1, 0
        return True

    def _start(self) -> bool:
        """Take a message's frames if all is here; else make room for them, if their sizes are."""
        have = self._to - self._from
        if have < _COUNT.size:
            return False
        (count,) = _COUNT.unpack_from(self._scratch, self._from)
        if not 0 < count <= min(MOST, self.limit // _COUNT.size):
            raise OSError(f"a message of {count} frames")
        prefix = _COUNT.size * (1 + count)
        if have < prefix:
            self._make_room(prefix)
            return False
        sizes = struct.unpack_from(f"<{count}Q", self._scratch, self._from + _COUNT.size)
        size = sum(sizes)
        if size > self.limit:
            raise OSError(f"a message of {size} bytes")
        self._from += prefix
        if have < prefix + size:
            self._frames, self._at, self._filled = [bytearray(n) for n in sizes], 0, 0
            return True
        ends = [*accumulate(sizes, initial=self._from)]
        self._frames = [self._scratch[start:end] for start, end in pairwise(ends)]
        self._from, self._at = ends[-1], count
        return True

    def _make_room(self, prefix: int) -> None:
        """Let the scratch hold so long a prefix."""
        if prefix > len(self._scratch):
            self._scratch = self._scratch.ljust(prefix, b"\0")
            self._view = memoryview(self._scratch)


class Pace:
    """Keeps links side by side: none gets far ahead of the slowest.

    TCP divides a line evenly in the long run only; meanwhile one server would have a chunk of all workers and
    another would wait for the last. Nor is even what is wanted where one server has more of the model than
    another: all are to be done at once, so each goes at the rate of what it was given so far. A link that
    has come to a standstill is not waited for.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._handed: dict[Link, float] = {}  # as a part of what each was given, from when all were level
        self._moved: dict[Link, float] = {}
        self._held: set[Link] = set()

    @property
    def holding(self) -> bool:
        """Whether any link waits for others."""
        return bool(self._held)

    def holds(self, link: Link) -> bool:
        """Whether a link waits for others."""
        return link in self._held

    def lets(self, link: Link) -> bool:
        """Whether a link with something to send may do so; it takes part from now on."""
        with self._lock:
            now = self._clock()
            if link not in self._handed:
                self._handed[link], self._moved[link] = self._slowest(now), now
            ahead = (self._handed[link] - self._slowest(now)) * link.given >= LEAD
            if ahead:
                self._held.add(link)
            else:
                self._held.discard(link)
            return not ahead

    def _slowest(self, now: float) -> float:
        moving = (n for link, n in self._handed.items() if now - self._moved[link] < STANDSTILL)
        return min(moving, default=max(self._handed.values(), default=0.0))

    def moved(self, link: Link, count: int) -> None:
        """The kernel has taken so many bytes of a link."""
        with self._lock:
            now = self._clock()
            stood = now - self._moved[link] >= STANDSTILL
            level = max(self._handed[link], self._slowest(now)) if stood else self._handed[link]
            self._handed[link], self._moved[link] = level + count / link.given, now

    def leave(self, link: Link) -> None:
        """A link has nothing to send."""
        with self._lock:
            self._handed.pop(link, None)
            self._moved.pop(link, None)
            self._held.discard(link)


class Link:
    """One socket to one peer, and what waits to go there.

    Attributes:
        pace: what it keeps beside other links, if anything.
        given: bytes that were to be sent so far; at first all links count as alike.
        watched: the writer empties its queue.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket, self.inbox = connection, Inbox(connection)
        self.file = connection.fileno()  # which a closed socket does not know any more
        self.peer = ""
        self.lane: Lane = "control"
        self.pace: Pace | None = None
        self.given = LEAD
        self.lock = threading.Lock()
        self.broken = self.watched = False
        self._queue: deque[Letter] = deque()  # the first may have left in part
        self._some_left = threading.Condition(self.lock)

    @property
    def waiting(self) -> bool:
        """Whether something has still to leave."""
        return bool(self._queue)

    @property
    def held(self) -> bool:
        """Whether it waits for links of its pace, not for the kernel."""
        return self.pace is not None and self.pace.holds(self)

    @property
    def needs_writer(self) -> bool:
        """Whether the writer has to be told: something waits here, or another link may wait for this one."""
        return not self.watched and (self.waiting or (self.pace is not None and self.pace.holding))

    def send(self, frames: Sequence[Frame], turn: int = 0) -> Letter:
        """Hand a message to the kernel, or as much of it as it takes; see Endpoint.send."""
        sizes = [memoryview(frame).nbytes for frame in frames]
        prefix = struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes)
        total, parts = sum(sizes), (prefix, *frames)
        if total <= SHORT:
            parts = (b"".join(parts),)
        letter = Letter([memoryview(part).cast("B") for part in parts], turn, self._some_left)
        with self.lock:
            if self.broken:
                letter.left = True
                return letter
            self.given += total
            self._enqueue(letter)
            if self._queue[0] is letter:
                self.flush()
        return letter

    def _enqueue(self, letter: Letter) -> None:
        """Let it overtake what has a later turn, but not the first, which may have left in part."""
        place = len(self._queue)
        while place > 1 and self._queue[place - 1].turn > letter.turn:
            place -= 1
        self._queue.insert(place, letter)

    def flush(self) -> int:
        """Hand over what the kernel and the pace take now, so many bytes; the caller holds the lock."""
        handed = 0
        while self._queue:
            if self.pace is not None and not self.pace.lets(self):
                return handed
            views = self._queue[0].views
            try:
                taken = self.socket.sendmsg(views[:GATHER])
            except BlockingIOError:
                return handed
            except OSError:
                self.give_up()
                return handed
            handed += taken
            if self.pace is not None:
                self.pace.moved(self, taken)
            while views and taken >= views[0].nbytes:
                taken -= views.pop(0).nbytes
            if views:
                views[0] = views[0][taken:]
            else:
                self._queue.popleft().left = True
                self._some_left.notify_all()
        if self.pace is not None:
            self.pace.leave(self)
        return handed

    def end(self) -> None:
        """Close the socket for all processes: one that the script has forked may hold a copy of it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def give_up(self) -> None:
        """The peer is gone: what waits will never leave. The caller holds the lock."""
        self.broken = True
        for letter in self._queue:
            letter.left = True
        self._queue.clear()
        self._some_left.notify_all()
        if self.pace is not None:
            self.pace.leave(self)


class Writer:
    """The thread that hands to the kernel what it did not take at once; started when first needed."""

    def __init__(self) -> None:
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._ending = False

    def watch(self, link: Link) -> None:
        """Empty a link's queue from now on."""
        with self._lock:
            self._links.add(link)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shoal writer", daemon=True)
                self._thread.start()
            link.watched = True
        self._wake()

    def forget(self, link: Link) -> None:
        """A link is about to be closed."""
        with self._lock:
            self._links.discard(link)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake already, or has ended
            self._wake_write.send(b"x")

    def _run(self) -> None:
        while True:
            with self._lock:
                links = {link.file: link for link in self._links}
                if self._ending and not links:
                    return
            while any([self._flush(link) for link in links.values() if link.held]):
                pass  # one that goes on may free another
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            held = [link for link in links.values() if link.held]
            for file, link in links.items():
                if not link.held:
                    poll.register(file, select.POLLOUT)
            for file, _ in poll.poll(STANDSTILL * 1000 if held else None):
                if file in links:
                    self._flush(links[file])
                else:
                    self._wake_read.recv(4096)

    def _flush(self, link: Link) -> int:
        with link.lock:
            handed = link.flush()
            if not link.waiting:
                with self._lock:
                    self._links.discard(link)
                    link.watched = False
        return handed

    def close(self, until: float) -> None:
        """Wait until all queues are empty."""
        self._ending = True
        if self._thread is not None:
            self._wake()
            self._thread.join(max(0.0, until - time.monotonic()))
        self._wake_write.close()
        if self._thread is None or not self._thread.is_alive():
            self._wake_read.close()
