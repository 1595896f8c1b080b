"""The balanced slicer: every server about the same bytes, or about its part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.partition.plan import ITEMSIZE, Parameter, Slice


def slices(parameters: Sequence[Parameter], weights: Sequence[int], groups: int, stripe: int) -> list[Slice]:
    """The slices, in the order of parameters; ``make_plan`` says how even they are.

    Args:
        weights: one per server.
        stripe: bytes that a server takes before it is the next one's turn.
    """
    loads = _head_starts(sum(parameter.nbytes for parameter in parameters), weights)
    placed = _place_whole(parameters, loads) + _pour(parameters, loads, stripe)
    joined = _joined(sorted(placed, key=_place))
    shards = ([s for s in joined if s.server == server] for server in range(len(weights)))
    return sorted((s for shard in shards for s in _with_masters(parameters, shard, groups)), key=_place)


def _head_starts(volume: int, weights: Sequence[int]) -> list[int]:
    """Loads (bytes) to begin with, so that filling all to one level gives each its part of the volume.

    A server of weight 0 begins so high that nothing reaches it.
    """
    parts = [volume * weight // sum(weights) for weight in weights]
    return [max(parts) - part if weight else 2 * volume for part, weight in zip(parts, weights, strict=True)]


def _place(s: Slice) -> tuple[int, int]:
    return s.parameter, s.start


def _joined(placed: Sequence[Slice]) -> list[Slice]:
    """Neighbours on one server become one slice."""
    joined: list[Slice] = []
    for s in placed:
        if joined and (joined[-1].parameter, joined[-1].server) == (s.parameter, s.server):
            s = replace(joined.pop(), stop=s.stop)
        joined.append(s)
    return joined


def _place_whole(parameters: Sequence[Parameter], loads: list[int]) -> list[Slice]:
    """The largest first, each on the least loaded server. ``loads`` (bytes) is brought up to date."""
    whole = [index for index, parameter in enumerate(parameters) if parameter.whole and parameter.numel]
    whole.sort(key=lambda index: -parameters[index].nbytes)
    return [_on_least(parameters, loads, index, 0, parameters[index].numel) for index in whole]


def _on_least(parameters: Sequence[Parameter], loads: list[int], index: int, start: int, stop: int) -> Slice:
    server = loads.index(min(loads))
    loads[server] += (stop - start) * ITEMSIZE[parameters[index].dtype]
    return Slice(index, start, stop, server, 0)


def _pour(parameters: Sequence[Parameter], loads: list[int], stripe: int) -> list[Slice]:
    """Fills all servers side by side up to their common level with the parameters that may be cut.

    They take turns of ``stripe`` bytes, so that neighbours in the model, whose gradients come at one time and
    whose values are wanted at one time, keep all servers busy; a table is cut once per server. The atoms that
    would rise above the level are dealt at the end, each to the least loaded server.
    """
    level = _level(loads, sum(parameter.nbytes for parameter in parameters if not parameter.whole))
    turns = _Turns(loads, level, stripe)
    poured: list[Slice] = []
    above: list[tuple[int, int, int]] = []
    for index, parameter in enumerate(parameters):
        itemsize, stop = ITEMSIZE[parameter.dtype], 0 if parameter.whole else parameter.numel
        if parameter.row:
            rows = parameter.numel // parameter.row
            turns.begin(max(-(-rows // len(loads)) * parameter.row * itemsize, stripe))
        start = 0
        while start < stop:
            least = min(parameter.atom, stop - start)
            fits = turns.room(least * itemsize) // itemsize
            if fits == 0:
                above.append((index, start, start + least))
                start += least
                continue
            taken = stop - start if fits >= stop - start else fits // parameter.atom * parameter.atom
            poured.append(Slice(index, start, start + taken, turns.server, 0))
            turns.take(taken * itemsize)
            start += taken
        if parameter.row:
            turns.begin(stripe)
    return poured + [_on_least(parameters, loads, *place) for place in above]


class _Turns:
    """Whose turn it is to be filled: of the servers with room, the one that is filled to the least part.

    Args:
        loads: bytes, brought up to date.
        level: bytes up to which each is filled.
        length: bytes of a turn.
    """

    def __init__(self, loads: list[int], level: int, length: int) -> None:
        self.server = 0
        self._loads, self._level = loads, level
        self._rooms = [max(1, level - load) for load in loads]
        self.begin(length)

    def begin(self, length: int) -> None:
        """Begin a new turn, of so many bytes, and so the turns after it."""
        self._length = self._taken = length

    def room(self, least: int) -> int:
        """How many bytes the server whose turn it is may take, ``least`` or more; 0 if none has room."""
        if self._taken + least > self._length or self._left(self.server) < least:
            fit = [server for server in range(len(self._loads)) if self._left(server) >= least]
            if not fit:
                return 0
            self.server = max(fit, key=lambda server: self._left(server) / self._rooms[server])
            self._taken = 0
        return min(self._left(self.server), max(self._length - self._taken, least))

    def take(self, nbytes: int) -> None:
        """The server takes so much."""
        self._loads[self.server] += nbytes
        self._taken += nbytes

    def _left(self, server: int) -> int:
        return self._level - self._loads[server]


def _level(loads: Sequence[int], volume: int) -> int:
    """How high (bytes) a volume poured over these loads stands, rounded down."""
    ordered = sorted(loads)
    levels = ((volume + sum(ordered[:count])) // count for count in range(len(loads), 0, -1))
    tops = reversed(ordered)
    return next(level for level, top in zip(levels, tops, strict=True) if level >= top)


def _with_masters(parameters: Sequence[Parameter], shard: Sequence[Slice], groups: int) -> Iterator[Slice]:
    """Divides one server's shard into consecutive parts of about equal bytes, one per server group."""
    total = sum((s.stop - s.start) * ITEMSIZE[parameters[s.parameter].dtype] for s in shard)
    master = done = 0
    for s in shard:
        parameter, start = parameters[s.parameter], s.start
        itemsize, atom = ITEMSIZE[parameter.dtype], s.stop - s.start if parameter.whole else parameter.atom
        while start < s.stop:
            room = (total * (master + 1) // groups - done) // itemsize
            nearest = (2 * room + atom) // (2 * atom) * atom
            taken = s.stop - start if room >= s.stop - start else min(nearest, s.stop - start)
            if taken <= 0:
                master += 1
                continue
            yield Slice(s.parameter, start, start + taken, s.server, master)
            start, done = start + taken, done + taken * itemsize
