"""The words of admission: what may happen to a server, and what it does about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.ledger import Life


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's gradient of one chunk in one step arrived; the payload stays with the caller."""

    life: Life
    chunk: int
    step: int
    number: int
    base: int


@dataclass(frozen=True, slots=True)
class Norm:
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


@dataclass(frozen=True, slots=True)
class Commit:
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


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker still lacks a chunk's values of a step; `whole`: it could not use a difference."""

    life: Life
    chunk: int
    step: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """A worker (again) takes part, in this life."""

    life: Life


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker ends its loop, having pushed `total` shares to this server in this life."""

    life: Life
    total: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A group is declared gone."""

    group: int


Event = Share | Norm | Commit | Pull | Join | Leave | Gone


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the payload of this share."""

    share: Share


@dataclass(frozen=True, slots=True)
class Release:
    """Forget the payload held for a worker's chunk."""

    group: int
    rank: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Average:
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


@dataclass(frozen=True, slots=True)
class Apply:
    """Update the chunk with the average; `staleness` in versions of the chunk."""

    average: Average
    step: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Send the chunk's present values to every worker of the group, the same bytes to all."""

    chunk: int
    group: int
    step: int
    skipped: bool
    staleness: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Send one worker once more what its group was sent; `whole`: not as a difference."""

    chunk: int
    group: int
    rank: int
    step: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a worker to send a share once more; chunk -1 = its commit."""

    group: int
    rank: int
    chunk: int
    step: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a waiting worker for which ranks of its group, and which slower groups, the server waits."""

    group: int
    rank: int
    step: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Answer the group's question for the norm: over these averages, or "not finite" (None)."""

    group: int
    optimizer: int
    step: int
    averages: tuple[Average, ...] | None


@dataclass(frozen=True, slots=True)
class Left:
    """Every worker of the group has left."""

    group: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A group that had left takes part again."""

    group: int


@dataclass(frozen=True, slots=True)
class Warm:
    """The first group's warm-up is over: the other groups begin."""


Action = Hold | Release | Apply | Reply | Answer | Ask | Tell | Measure | Left | Returned | Warm


@dataclass(frozen=True, slots=True)
class Owned:
    """What admission has to know of a chunk: its optimizer, and whether it is a buffer's."""

    optimizer: int
    buffer: bool = False
