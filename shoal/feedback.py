"""What encoding cuts off is not lost: it comes with the next gradient, or the next difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from shoal.codecs import Coded, Coding, decoded, dtype_of, move, wide
from shoal.partition import Chunk
from shoal.rows import Content
from shoal.wire import Values


class Residuals:
    """What a worker's pushes owe: per chunk what encoding has cut off of the gradients that counted so far.

    Only the share that counts changes it, once its step is over: one that is superseded, skipped or sent
    again does not.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._owed: dict[int, tuple[Tensor, float]] = {}  # and the loss scale that it carries
        self._pushed: dict[int, Tensor] = {}  # what will be owed if the share in flight counts

    def of(self, chunk: Chunk) -> Tensor:
        """What is owed of a chunk (flat)."""
        owed, _ = self._owed.get(chunk.number, (None, 1.0))
        return torch.zeros(chunk.size, dtype=wide(dtype_of(chunk))) if owed is None else owed

    def encode(self, chunk: Chunk, gradient: Content, touched: Collection[int]) -> Content | Coded:
        """What travels of a chunk's gradient, with what is owed; itself where it is not encoded.

        Args:
            touched: pieces that have a gradient. What is owed of the others stays, because no server would
                apply it where no worker has one.
        """
        if not isinstance(gradient, Tensor) or not self._coding.applies(chunk):
            return gradient
        x = gradient.to(wide(gradient.dtype))
        if not self._coding.feedback:
            return self._coding.encode(x, chunk)
        owed = self.of(chunk)
        x = x + owed
        untouched = [p for index, p in enumerate(chunk.pieces) if index not in touched]
        spans = [slice(piece.at, piece.at + piece.stop - piece.start) for piece in untouched]
        for span in spans:
            x[span] = 0
        coded = self._coding.encode(x, chunk)
        rest = x.sub_(decoded(coded, chunk))
        for span in spans:
            rest[span] = owed[span]
        self._pushed[chunk.number] = rest
        return coded

    def settle(self, chunks: Iterable[int], counted: Collection[int], scale: float = 1.0) -> None:
        """A step of these chunks is over, and the last shares of some counted.

        Args:
            scale: the loss scale of the step's gradients. Where it is another than before, what was owed came
                with the wrong one, and the difference is owed as well.
        """
        for chunk in chunks:
            rest = self._pushed.pop(chunk, None)
            if rest is None or chunk not in counted:
                continue
            owed, before = self._owed.get(chunk, (None, scale))
            if owed is not None and before != scale:
                rest += owed * (scale / before - 1)
            self._owed[chunk] = rest, scale


class Copies:
    """What a worker last had of each chunk whose values travel as differences: what they are added to.

    A copy of its own, because the model's are the script's to touch.
    """

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._values: dict[int, Tensor] = {}
        self._editions: dict[int, int] = {}

    def current(self, chunk: Chunk, base: int) -> bool:
        """Whether this worker has the edition that a message builds on; 0 = it builds on none."""
        return base in (0, self._editions.get(chunk.number))

    def take(self, chunk: Chunk, content: Content | None, body: Values) -> Content | None:
        """A chunk's values from what came with a message that is `current`; None = as they are."""
        self._editions[chunk.number] = body.edition
        if not isinstance(content, Tensor) or not self._coding.applies(chunk):
            return content
        if body.base:
            move(self._values[chunk.number], content)
        else:
            self._values[chunk.number] = content.clone()
        return self._values[chunk.number]
