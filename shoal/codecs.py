"""Gradients and values in fewer bytes: how `cluster.wire_dtype` writes a flat tensor, and reads it back.

What travels of a chunk is encoded where the chunk holds parameters of a real floating-point type that is
wider than the wire's. Buffers, tables, integers and complex numbers travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.config import Cluster
from shoal.partition import Chunk

BLOCK = 1024  # elements that share one scale: 0.1 to 0.4 % on top of what they need themselves
LARGEST = 127  # of an int8, on both sides of 0


@dataclass(frozen=True)
class Coded:
    """Encoded values: the codec's name, and its raw frames as flat tensors."""

    codec: str
    parts: tuple[Tensor, ...]


class Codec(Protocol):
    """One way to write a flat tensor x of `wide(dtype)`, where `dtype` is the parameters'.

    What is not finite in x is not finite in what is read back.

    Attributes:
        bits: of one element on the wire; a dtype with no more is not encoded.
        feedback: what is cut off of a gradient is kept, and added to the next one.
    """

    bits: int
    feedback: bool

    def encode(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The raw frames as flat tensors, in memory of their own."""
        ...

    def layout(self, size: int, dtype: torch.dtype, nbytes: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Dtype and elements of each frame for `size` elements, where the first one has `nbytes`."""
        ...

    def decode(self, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """What `encode` wrote, `size` elements of `wide(dtype)`; raises IndexError for a place outside."""
        ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are computed in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


class Rounded:
    """Each element to the nearest bfloat16: 8 bits of precision and the range of float32."""

    bits, feedback = 16, False

    def encode(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        return (x.to(torch.bfloat16),)

    def layout(self, size: int, dtype: torch.dtype, nbytes: int) -> tuple[tuple[torch.dtype, int], ...]:
        """See Codec.layout."""
        return ((torch.bfloat16, size),)

    def decode(self, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """See Codec.decode."""
        return parts[0].to(wide(dtype))


class Scaled:
    """Blocks of elements, each divided by a scale of its own and rounded to the nearest number of a type.

    To float16 the scale is a power of two, so dividing by it loses nothing; and with it nothing overflows,
    and only what is below 2⁻³⁹ of its block's largest element is lost. To int8 that one becomes ±127.
    """

    def __init__(self, kind: torch.dtype, feedback: bool) -> None:
        self.bits, self.feedback = kind.itemsize * 8, feedback
        self._kind = kind

    def encode(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        blocks = _blocks(x)
        scales = self._scales(blocks.abs().amax(1, keepdim=True))
        scaled = blocks / scales
        if not self._kind.is_floating_point:
            scaled.round_().clamp_(-LARGEST, LARGEST)
        return scaled.to(self._kind).view(-1)[: len(x)], scales.view(-1)

    def _scales(self, peaks: Tensor) -> Tensor:
        if self._kind.is_floating_point:
            exponents = torch.frexp(peaks).exponent - 15  # the peak becomes less than 2¹⁵
            least = round(math.log2(torch.finfo(peaks.dtype).smallest_normal))
            return torch.ldexp(torch.ones_like(peaks), exponents.clamp_(min=least))
        scales = peaks / LARGEST
        return scales.masked_fill_(scales == 0, 1)

    def layout(self, size: int, dtype: torch.dtype, nbytes: int) -> tuple[tuple[torch.dtype, int], ...]:
        """See Codec.layout."""
        return (self._kind, size), (wide(dtype), -(-size // BLOCK))

    def decode(self, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """See Codec.decode."""
        numbers, scales = parts
        return (_blocks(numbers.to(wide(dtype))).mul_(scales[:, None])).view(-1)[:size]


class Largest:
    """The largest elements, a fraction of all: their places (int32), and they themselves in `dtype`."""

    bits, feedback = 0, True

    def __init__(self, fraction: float = 0.01) -> None:
        self._fraction = fraction  # whoever only reads need not know it

    def encode(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        left_out = len(x) - math.ceil(len(x) * self._fraction)
        order = np.argpartition(x.abs().numpy(), left_out) if len(x) else np.empty(0, np.int64)
        index = torch.from_numpy(order[left_out:])  # a quarter of the time that torch's topk takes
        return index.to(torch.int32), x[index].to(dtype)

    def layout(self, size: int, dtype: torch.dtype, nbytes: int) -> tuple[tuple[torch.dtype, int], ...]:
        """See Codec.layout."""
        count = nbytes // torch.int32.itemsize
        return (torch.int32, count), (dtype, count)

    def decode(self, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """See Codec.decode."""
        index, values = parts
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise IndexError(f"places {int(index.min())} to {int(index.max())} of {size}")
        x = torch.zeros(size, dtype=wide(dtype))
        x[index.long()] = values.to(x.dtype)
        return x


def _blocks(flat: Tensor) -> Tensor:
    """Rows of BLOCK elements over a flat tensor, or over a copy that zeros fill up."""
    count = -(-len(flat) // BLOCK)
    if missing := count * BLOCK - len(flat):
        flat = pad(flat, (0, missing))
    return flat.view(count, BLOCK)


CODECS: dict[str, Codec] = {
    "bfloat16": Rounded(),
    "float16": Scaled(torch.float16, feedback=False),
    "int8": Scaled(torch.int8, feedback=True),
    "topk": Largest(),
}
"""By name; any of them reads what another of its name has written."""


@dataclass(frozen=True)
class Coding:
    """How one run encodes; `codec` None = not at all."""

    name: str = "float32"
    codec: Codec | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Coding:
        """What the block asks for."""
        name = cluster.wire_dtype
        codec = Largest(cluster.topk_fraction) if name == "topk" else CODECS.get(name)
        return cls(name, codec)

    def applies(self, chunk: Chunk) -> bool:
        """Whether the chunk's gradients and values are encoded."""
        return self.codec is not None and encodable(chunk, self.codec)

    @property
    def feedback(self) -> bool:
        """Whether what is cut off of a gradient is kept."""
        return self.codec is not None and self.codec.feedback

    def encode(self, x: Tensor, chunk: Chunk) -> Coded:
        """A chunk's gradient, or a difference of its values (flat, `wide` of its dtype), encoded."""
        assert self.codec is not None
        return Coded(self.name, self.codec.encode(x, dtype_of(chunk)))


EXACT = Coding()
"""Nothing is encoded."""


def dtype_of(chunk: Chunk) -> torch.dtype:
    """The dtype of what is in the chunk."""
    return getattr(torch, chunk.dtype)  # type: ignore[no-any-return]


def encodable(chunk: Chunk, codec: Codec) -> bool:
    """Whether a codec fits what is in the chunk."""
    dtype = dtype_of(chunk)
    dense = chunk.buffer is None and not chunk.row
    return dense and dtype.is_floating_point and dtype.itemsize * 8 > codec.bits


def decoded(coded: Coded, chunk: Chunk) -> Tensor:
    """What an encoded chunk stands for, flat, in `wide` of its dtype."""
    return CODECS[coded.codec].decode(coded.parts, chunk.size, dtype_of(chunk))


def move(known: Tensor, difference: Tensor) -> None:
    """Move `known` by a difference, in place; both ends of a link do just this, and so have the same bits."""
    known.copy_(known + difference)
