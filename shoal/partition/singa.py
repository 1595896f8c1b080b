"""The slicer of Apache SINGA 0.3, made to end always and to name only servers that exist."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.partition.plan import Parameter, Slice


def slices(parameters: Sequence[Parameter], servers: int, groups: int) -> list[Slice]:
    """The slices, in the order of parameters; sizes are counted in elements, as SINGA did."""
    sizes = [parameter.numel for parameter in parameters]
    whole = [parameter.whole for parameter in parameters]
    lengths = cut(math.lcm(servers, groups), sizes, whole, [parameter.row or 1 for parameter in parameters])
    flat = [length for run in lengths for length in run]
    places = zip(boxes_of(servers, flat), boxes_of(groups, flat), strict=True)
    cuts = []
    for index, run in enumerate(lengths):
        start = 0
        for length in run:
            cuts.append(Slice(index, start, start + length, *next(places)))
            start += length
    return cuts


def cut(
    boxes: int, sizes: Sequence[int], whole: Sequence[bool], rows: Sequence[int] | None = None
) -> list[list[int]]:
    """The lengths of each parameter's slices (elements), cut to fill ``boxes``; a whole one is never cut.

    A slice is rounded up to a multiple of its parameter's entry in ``rows`` (elements).
    """
    average = sum(sizes) // boxes + sum(sizes) % boxes
    slack, room = average // 10, average
    lengths: list[list[int]] = [[] for _ in sizes]
    for index, size in enumerate(sizes):
        while size > 0:
            if whole[index] or room + slack >= size:
                taken, room = size, max(0, room - size)
            else:
                taken, room = room if room >= slack else 0, average
                if rows is not None:
                    taken = min(-(-taken // rows[index]) * rows[index], size)
            if taken:
                lengths[index].append(taken)
            size -= taken
    return lengths


def boxes_of(boxes: int, lengths: Sequence[int]) -> list[int]:
    """Which of ``boxes`` each slice goes to.

    The original looked for room for ever where a slice exceeds an empty box, and counted past the last box;
    here an empty box takes any slice, and the last box all that come.
    """
    average = sum(lengths) // boxes + sum(lengths) % boxes
    slack, room, box = average // 10, average, 0
    chosen = []
    for length in lengths:
        if room + slack < length and room < average and box < boxes - 1:
            box, room = box + 1, average
        room = max(0, room - length)
        chosen.append(box)
    return chosen
