"""The words of admission: what may happen to a server, and what it does about it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from shoal.ledger import Life


class Share(Struct, frozen=True):
    """A worker's gradient of one chunk in one step arrived; the payload stays with the caller."""

    life: Life
    chunk: int
    step: int
    number: int
    base: int


class Norm(Struct, frozen=True):
    """A worker asks for the norm of its group's averaged gradient; fields as in Commit.

    Attributes:
        again: no answer came, so something may have been lost.
    """

    life: Life
    optimizer: int
    step: int
    counts: Mapping[int, int]
    touched: Mapping[int, tuple[int, ...]]
    weight: float
    finite: bool
    again: bool = False


class Commit(Struct, frozen=True):
    """A worker's word about one step of one optimizer.

    Attributes:
        pushed: chunk → how many shares the worker pushed for it in this step.
        counts: chunk → number of the share that counts; the others are superseded.
        touched: chunk → pieces that have a gradient, where not all have.
        weight: samples behind the gradient; at 0 the worker's shares are left out.
        total: shares pushed to this server in this life.
    """

    life: Life
    optimizer: int
    step: int
    pushed: Mapping[int, int]
    counts: Mapping[int, int]
    touched: Mapping[int, tuple[int, ...]]
    weight: float
    finite: bool
    total: int


class Pull(Struct, frozen=True):
    """A worker still lacks a chunk's values of a step; `whole`: it could not use a difference."""

    life: Life
    chunk: int
    step: int
    whole: bool = False


class Join(Struct, frozen=True):
    """A worker (again) takes part, in this life."""

    life: Life


class Leave(Struct, frozen=True):
    """A worker ends its loop, having pushed `total` shares to this server in this life."""

    life: Life
    total: int


class Gone(Struct, frozen=True):
    """A group is declared gone."""

    group: int


Event = Share | Norm | Commit | Pull | Join | Leave | Gone


class Hold(Struct, frozen=True):
    """Keep the payload of this share."""

    share: Share


class Release(Struct, frozen=True):
    """Forget the payload held for a worker's chunk."""

    group: int
    rank: int
    chunk: int


class Average(Struct, frozen=True):
    """How the shares of a round combine.

    Attributes:
        ranks: whose shares are summed, in this order.
        parts: each share's part of the total weight; None = equal, divide the sum by `count`.
        count: workers that the average is over; more than `ranks` where some have no gradient.
        touched: pieces that some worker touched; None = all.
    """

    chunk: int
    group: int
    ranks: tuple[int, ...]
    parts: tuple[float, ...] | None
    count: int
    touched: tuple[int, ...] | None


class Apply(Struct, frozen=True):
    """Update the chunk with the average; `staleness` in versions of the chunk."""

    average: Average
    step: int
    staleness: int


class Reply(Struct, frozen=True):
    """Send the chunk's present values to every worker of the group, the same bytes to all."""

    chunk: int
    group: int
    step: int
    skipped: bool
    staleness: int


class Answer(Struct, frozen=True):
    """Send one worker once more what its group was sent; `whole`: not as a difference."""

    chunk: int
    group: int
    rank: int
    step: int
    whole: bool = False


class Ask(Struct, frozen=True):
    """Ask a worker to send a share once more; chunk -1 = its commit."""

    group: int
    rank: int
    chunk: int
    step: int


class Tell(Struct, frozen=True):
    """Tell a waiting worker for which ranks of its group, and which slower groups, the server waits."""

    group: int
    rank: int
    step: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]


class Measure(Struct, frozen=True):
    """Answer the group's question for the norm: over these averages, or "not finite" (None)."""

    group: int
    optimizer: int
    step: int
    averages: tuple[Average, ...] | None


class Left(Struct, frozen=True):
    """Every worker of the group has left."""

    group: int


class Returned(Struct, frozen=True):
    """A group that had left takes part again."""

    group: int


class Warm(Struct, frozen=True):
    """The first group's warm-up is over: the other groups begin."""


Action = Hold | Release | Apply | Reply | Answer | Ask | Tell | Measure | Left | Returned | Warm


class Owned(Struct, frozen=True):
    """What admission has to know of a chunk: its optimizer, and whether it is a buffer's."""

    optimizer: int
    buffer: bool = False
