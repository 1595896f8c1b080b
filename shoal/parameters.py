"""A model's values as the wire sees them: flat bytes, and slots."""

from __future__ import annotations

import cmath
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.codecs import CODECS, Coded, decoded, dtype_of, encodable
from shoal.errors import ProtocolError
from shoal.partition import ITEMSIZE, Chunk, Plan
from shoal.rows import Content, Rows, no_rows, numbers_of, rows_of
from shoal.staging import Stage
from shoal.wire import Frame

BLOCK = 1 << 18  # elements of a gradient that are copied and summed at a time

Allocate = Callable[[int], Tensor]
"""Gives zeroed memory (uint8) of so many bytes; a transport's is memory that peers may read in place."""


def private(nbytes: int) -> Tensor:
    """Memory that no other member sees."""
    return torch.zeros(nbytes, dtype=torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(_raw(tensor).numpy())  # type: ignore[arg-type]


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor (flat, uint8), without a copy."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.stride(0) != 1:  # one element is contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def from_bytes(frame: Frame, dtype: str) -> Tensor:
    """A flat tensor over a received frame, without a copy."""
    kind: torch.dtype = getattr(torch, dtype)
    if memoryview(frame).nbytes == 0:
        return torch.empty(0, dtype=kind)
    if isinstance(frame, bytes):
        frame = bytearray(frame)  # torch refuses to wrap memory that must not be written to
    return torch.frombuffer(frame, dtype=kind)


def checked(frames: Sequence[Frame], chunk: Chunk, sender: str) -> Tensor:
    """The one raw frame of a message about a chunk, its size checked against the plan."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sizes != [chunk.nbytes]:
        raise ProtocolError(
            f"{sender} sent frames of {sizes} bytes for chunk {chunk.number}, not {chunk.nbytes}"
        )
    return from_bytes(frames[0], chunk.dtype)


def frames_of(content: Content | Coded) -> list[Frame]:
    """The raw frames of what travels of a chunk; of rows their numbers first."""
    if isinstance(content, Rows):
        return [as_bytes(content.index), as_bytes(content.values)]
    if isinstance(content, Coded):
        return [as_bytes(part) for part in content.parts]
    return [as_bytes(content)]


class Frames:
    """`frames_of` what is sent step after step: the same objects, by which `Memory.place` knows them."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[Content | Coded, list[Frame]]] = {}

    def of(self, key: Hashable, content: Content | Coded) -> list[Frame]:
        """The frames of a content; `key`: what has one content at a time."""
        last, frames = self._last.get(key, (None, []))
        if last is not content:
            frames = frames_of(content)
            self._last[key] = content, frames
        return frames


def codec_of(content: Content | Coded | None) -> str:
    """What the header says of those frames."""
    if isinstance(content, Coded):
        return content.codec
    return "rows" if isinstance(content, Rows) else "raw"


def received(frames: Sequence[Frame], codec: str, chunk: Chunk, sender: str) -> Content:
    """What `frames_of` made, checked against the plan; raises ProtocolError for anything else."""
    if codec == "raw":
        return checked(frames, chunk, sender)
    if codec != "rows":
        return _read(frames, codec, chunk, sender)
    sizes = [memoryview(frame).nbytes for frame in frames]
    count = sizes[0] // 8 if sizes else 0
    if not chunk.row or sizes != [count * 8, count * chunk.row * ITEMSIZE[chunk.dtype]]:
        raise ProtocolError(
            f"{sender} sent frames of {sizes} bytes as rows of chunk {chunk.number}, "
            f"which has rows of {chunk.row} elements"
        )
    index, values = from_bytes(frames[0], "int64"), from_bytes(frames[1], chunk.dtype)
    if count and (index[0] < 0 or index[-1] >= chunk.rows or bool((index.diff() <= 0).any())):
        raise ProtocolError(
            f"{sender} sent rows of chunk {chunk.number}, which has {chunk.rows}, whose numbers do not ascend"
        )
    return Rows(index, values.view(count, chunk.row))


def _read(frames: Sequence[Frame], codec: str, chunk: Chunk, sender: str) -> Tensor:
    """What an encoded message amounts to (flat, float32 or wider)."""
    if codec not in CODECS or not encodable(chunk, CODECS[codec]):
        raise ProtocolError(f"{sender} sent chunk {chunk.number} as {codec[:40]}, which does not fit it")
    sizes = [memoryview(frame).nbytes for frame in frames]
    layout = CODECS[codec].layout(chunk.size, dtype_of(chunk), sizes[0] if sizes else 0)
    if sizes != [count * kind.itemsize for kind, count in layout]:
        raise ProtocolError(f"{sender} sent frames of {sizes} bytes for chunk {chunk.number} in {codec}")
    parts = (from_bytes(frame, dtype_name(kind)) for frame, (kind, _) in zip(frames, layout, strict=True))
    try:
        return decoded(Coded(codec, tuple(parts)), chunk)
    except IndexError as error:
        raise ProtocolError(f"{sender} sent of chunk {chunk.number} the {error}") from None


def fingerprint(tensor: Tensor) -> int:
    """A checksum of a tensor's bytes (CRC-32)."""
    return zlib.crc32(as_bytes(tensor.detach().contiguous().cpu()))


def buffer_mark(buffer: Tensor) -> tuple[int, ...]:
    """Tells whether a buffer was written to; by its bytes too, as batch norm's kernels count no versions."""
    version = buffer.data_ptr(), buffer._version
    counted = isinstance(buffer, nn.Parameter) or not buffer.is_floating_point()
    return version if counted else (*version, fingerprint(buffer))


class BufferAt(NamedTuple):
    """Where a buffer lives; looked up anew each time, because modules may replace the tensor.

    A parameter that no optimizer trains (frozen, or a teacher that the script moves) is one as well.
    """

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now."""
        return getattr(self.module, self.key)  # type: ignore[no-any-return]


class Replica:
    """A worker's copy of the model, and one slot per chunk.

    A slot takes a chunk's gradient from the hook, the only copy there; then it belongs to the wire until the
    chunk's new values arrive. A table's takes no room: it is replaced by the rows of each gradient.

    Args:
        stage: what copies between the slots and GPUs, and says when that is done.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[Tensor],
        places: Sequence[BufferAt],
        allocate: Allocate = private,
        stage: Stage | None = None,
    ) -> None:
        self.plan, self.stage = plan, stage
        self.tensors = tuple(tensors)
        self.places = tuple(places)
        flat = laid_out(sorted((chunk for chunk in plan.chunks if not chunk.row), key=_first), allocate)
        self.slots = [flat.get(c.number, no_rows(c.row, dtype_of(c))) for c in plan.chunks]
        self._sizes = {c.number: [piece.stop - piece.start for piece in c.pieces] for c in plan.chunks}
        self._parts = {number: self._cut(slot, number) for number, slot in flat.items()}

    def piece(self, chunk: Chunk, index: int) -> Tensor:
        """The slot's part for one piece of the chunk, flat; of a table's, the rows it holds."""
        parts = self._parts.get(chunk.number)
        return numbers_of(self.slots[chunk.number]) if parts is None else parts[index]

    def _cut(self, flat: Tensor, chunk: int) -> Sequence[Tensor]:
        """What belongs to each piece of a chunk."""
        sizes = self._sizes[chunk]
        return flat.split_with_sizes(sizes) if len(sizes) > 1 else [flat]

    def fill(self, chunk: Chunk, index: int, gradient: Tensor | None) -> bool:
        """Copy a gradient (shape of the parameter) into the slot; None fills with zeros.

        Returns:
            True if all of it was seen to be finite on the way; False says nothing.
        """
        piece = chunk.pieces[index]
        if chunk.row and gradient is not None:
            self.slots[chunk.number] = rows_of(gradient, piece)
            return False
        slot = self.piece(chunk, index)
        if gradient is None:
            if self.stage is not None:
                self.stage.copied(chunk.number, wait=True)
            slot.zero_()
            return False
        source = gradient.detach().reshape(-1)[piece.start : piece.stop]
        if self.stage is None and len(slot) > BLOCK:
            return cmath.isfinite(_copied(slot, source))
        self._take(chunk, slot, source)
        return False

    def _take(self, chunk: Chunk, slot: Tensor, source: Tensor) -> None:
        if self.stage is None:
            slot.copy_(source)
        else:
            self.stage.down(chunk.number, slot, source)

    def fill_buffer(self, chunk: Chunk) -> None:
        """Copy a buffer as it is now into its slot."""
        assert chunk.buffer is not None
        source = self.places[chunk.buffer].tensor.detach().reshape(-1)
        self._take(chunk, numbers_of(self.slots[chunk.number]), source)

    def holds(self, chunk: Chunk, index: int, gradient: Tensor) -> bool:
        """Whether the slot has every bit of a gradient."""
        piece, slot = chunk.pieces[index], self.slots[chunk.number]
        if gradient.is_sparse is not isinstance(slot, Rows):
            return False
        if isinstance(slot, Rows):
            rows = rows_of(gradient, piece)
            return torch.equal(rows.index, slot.index) and _same_bytes(rows.values, slot.values)
        return _same_bytes(gradient.reshape(-1)[piece.start : piece.stop], self.piece(chunk, index))

    def read(self, chunk: Chunk, into: Tensor | None = None) -> Tensor:
        """The chunk's present values in this copy, flat, on the CPU; written to `into` if that is given."""
        if chunk.buffer is not None:
            parts = [self.places[chunk.buffer].tensor.detach().reshape(-1)]
        else:
            parts = [self.tensors[p.parameter].detach().reshape(-1)[p.start : p.stop] for p in chunk.pieces]
        return torch.cat([part.cpu() for part in parts], out=into)

    @torch.no_grad()
    def install(self, chunk: Chunk, values: Content, into: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write a chunk's values into the model, or into other tensors given for the model's."""
        if isinstance(values, Rows):
            (piece,) = chunk.pieces
            tensor = self.tensors[piece.parameter]
            index = (values.index + piece.start // chunk.row).to(tensor.device)
            (into[tensor] if into else tensor).index_copy_(0, index, values.values.to(tensor.device))
            return
        if chunk.buffer is not None:
            target = self.places[chunk.buffer].tensor
            target = into[target] if into else target
            self._give(target, values.view(target.shape))
            return
        for piece, part in zip(chunk.pieces, self._cut(values, chunk.number), strict=True):
            tensor = self.tensors[piece.parameter]
            tensor = into[tensor] if into else tensor
            if piece.stop - piece.start == tensor.numel():
                self._give(tensor, part.view(tensor.shape))
            elif tensor.is_contiguous():
                self._give(tensor.view(-1)[piece.start : piece.stop], part)
            else:  # a strided parameter has no flat view to write through
                flat = tensor.reshape(-1)
                flat[piece.start : piece.stop] = part.to(flat.device)
                tensor.copy_(flat.view(tensor.shape))

    def _give(self, target: Tensor, values: Tensor) -> None:
        if self.stage is None:
            target.copy_(values)
        else:
            self.stage.up(target, values)

    def settle(self) -> None:
        """Wait until nothing reads any more what `install` was given; its memory may then be written to."""
        if self.stage is not None:
            self.stage.settle()

    def close(self) -> None:
        """Let go of memory that was page-locked for GPUs."""
        if self.stage is not None:
            self.stage.close()

    def build(self, values: Mapping[int, Content]) -> dict[Tensor, Tensor]:
        """Copies of the model's tensors that hold other values (chunk → flat); the model stays as it is."""
        ours = [*self.tensors, *(place.tensor for place in self.places)]
        copies = {tensor: tensor.detach().clone() for tensor in ours}
        for number, flat in values.items():
            self.install(self.plan.chunks[number], flat, copies)
        self.settle()
        return copies

    def snapshot(self) -> dict[int, Tensor]:
        """A copy of all chunks' values, to be installed again later."""
        return {chunk.number: self.read(chunk) for chunk in self.plan.chunks}

    def checksum(self) -> int:
        """A checksum of all values, to compare two workers' starts."""
        value = 0
        for chunk in self.plan.chunks:
            value = zlib.crc32(as_bytes(self.read(chunk)), value)
        return value


def _copied(slot: Tensor, source: Tensor) -> complex:
    """Copy all of a flat tensor; returns its sum, to which each block comes while a cache still holds it."""
    total: complex = 0
    for room, block in zip(torch.split(slot, BLOCK), torch.split(source, BLOCK), strict=True):
        total += room.copy_(block).sum().item()
    return total


def _first(chunk: Chunk) -> tuple[int, int]:
    """Where in the model a chunk begins; buffers come last."""
    return (chunk.pieces[0].parameter, chunk.pieces[0].start) if chunk.pieces else (sys.maxsize, chunk.number)


def laid_out(chunks: Sequence[Chunk], allocate: Allocate) -> dict[int, Tensor]:
    """Room for the values of chunks (number → flat zeros), side by side."""
    starts, end = [], 0
    for chunk in chunks:
        itemsize = ITEMSIZE[chunk.dtype]
        starts.append(-(-end // itemsize) * itemsize)
        end = starts[-1] + chunk.nbytes
    memory = allocate(end)
    return {
        chunk.number: memory[start : start + chunk.nbytes].view(dtype_of(chunk))
        for chunk, start in zip(chunks, starts, strict=True)
    }


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_raw(a.contiguous().cpu()), _raw(b.contiguous()))


def pieces_of(chunks: Iterable[Chunk], parameters: int) -> list[list[tuple[Chunk, int]]]:
    """For each parameter, the chunks it lies in, with the index of its piece there."""
    found: list[list[tuple[Chunk, int]]] = [[] for _ in range(parameters)]
    for chunk in chunks:
        for index, piece in enumerate(chunk.pieces):
            found[piece.parameter].append((chunk, index))
    return found
