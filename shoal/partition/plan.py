"""What a plan is made of, and how two models are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from itertools import groupby

import msgspec

ATOM = 64  # elements; a parameter that may be cut is cut at multiples of this, unless it is a table

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}  # bytes per element, by torch's name of the dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as the plan sees it.

    ``settings`` is the index of the optimizer's parameter group; ``whole`` says that the optimizer must see
    the parameter in one piece; ``row`` is the elements per row of a table whose gradients are sparse rows, 0
    for any other parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: int = 0
    settings: int = 0
    whole: bool = False
    row: int = 0

    @property
    def atom(self) -> int:
        """Elements: where it may be cut, it is cut at multiples of this."""
        return self.row or ATOM

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of the model, such as a running mean."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: int = 0

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of a flattened parameter, their server and their master server group."""

    parameter: int
    start: int
    stop: int
    server: int
    master: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a flattened parameter, from element ``at`` of a chunk on."""

    parameter: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``[start, stop)`` of a server's flat space of one dtype: some pieces, or one buffer.

    ``row`` is the elements per row where the one piece is a table's rows, else 0.
    """

    number: int
    server: int
    dtype: str
    start: int
    stop: int
    optimizer: int
    master: int
    pieces: tuple[Piece, ...]
    buffer: int | None = None
    row: int = 0

    @property
    def rows(self) -> int:
        """Rows of a table's chunk."""
        return self.size // self.row if self.row else 0

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Plan:
    """What is where: slices in the order of parameters, chunks by server, then dtype, then place."""

    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    servers: int
    server_groups: int
    slices: tuple[Slice, ...]
    chunks: tuple[Chunk, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every field, in hexadecimal digits."""
        return sha256(msgspec.json.encode(self)).hexdigest()

    @cached_property
    def _by_server(self) -> dict[int, tuple[Chunk, ...]]:
        return {server: tuple(run) for server, run in groupby(self.chunks, key=lambda chunk: chunk.server)}

    def chunks_of(self, server: int) -> tuple[Chunk, ...]:
        """The chunks of one server, in order of their numbers; none if it holds nothing."""
        return self._by_server.get(server, ())

    def spaces(self, server: int) -> dict[str, int]:
        """The sizes of a server's flat spaces in elements, by dtype, in the order of the chunks."""
        return {chunk.dtype: chunk.stop for chunk in self.chunks_of(server)}


def difference(a: Sequence[Parameter | Buffer], b: Sequence[Parameter | Buffer]) -> str | None:
    """The first difference of ``b`` from ``a`` in words, or None: names, their order, then other fields."""
    for word, these, those in (("missing", a, b), ("extra", b, a)):
        known = {tensor.name for tensor in those}
        names = [tensor.name for tensor in these if tensor.name not in known]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"{word}: {', '.join(names[:3])}{more}"
    if len(a) != len(b):
        return f"{len(b)} entries instead of {len(a)}"
    for x, y in zip(a, b, strict=True):
        if x.name != y.name:
            return f"another order: {y.name} in the place of {x.name}"
        for entry in fields(x):
            wanted, found = getattr(x, entry.name), getattr(y, entry.name)
            if wanted != found:
                return f"{x.name}: {entry.name} {found} instead of {wanted}"
    return None
