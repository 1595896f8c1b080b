"""Leased data: each batch of an epoch goes to one group, whoever asks when, and a quick group gets more."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from shoal.data import Loader, Place, make_loader
from shoal.errors import ProtocolError, UsageError
from shoal.leases import MOST, SPLIT, Ask, Block, Leases, Tenant
from shoal.sampling import Batch, order

Worker = tuple[int, int]

few = st.integers(1, 4)


class Desk:
    """A worker's way to the table, on which questions and answers may be lost or come twice."""

    def __init__(self, table: Leases, worker: Worker, chance: random.Random | None = None) -> None:
        self._table, self._worker, self._chance = table, worker, chance

    def request(self, ask: Ask) -> None:
        if self._chance is not None and self._chance.random() < 0.5:
            self._table.block(*self._worker, ask)

    def block(self, ask: Ask) -> Block:
        for _ in range(self._chance.randrange(3) if self._chance is not None else 0):
            self._table.block(*self._worker, ask)
        return self._table.block(*self._worker, ask)


# The table.


def numbered(desk: Desk, batches: int, epochs: int) -> Iterator[tuple[int, int]]:
    """The (epoch, batch) pairs that a worker gets."""
    dealt = [Batch((number,), 1) for number in range(batches)]
    for epoch in range(epochs):
        for batch in Tenant(lambda: desk).batches(epoch, 0, dealt, 1):
            yield epoch, batch.indices[0]


@given(few, few, st.integers(0, 90), st.integers(1, 3), st.integers(0))
@settings(max_examples=150)
def test_each_batch_goes_to_one_group_whatever_the_order_of_questions(
    groups: int, workers: int, batches: int, epochs: int, seed: int
) -> None:
    chance = random.Random(seed)
    table = Leases(groups, groups * workers)
    everyone = list(product(range(groups), range(workers)))
    asking = {worker: numbered(Desk(table, worker, chance), batches, epochs) for worker in everyone}
    got: dict[Worker, list[tuple[int, int]]] = {worker: [] for worker in everyone}
    pace = {group: chance.choice([1, 1, 10]) for group in range(groups)}
    while asking:
        worker = chance.choices(list(asking), [pace[group] for group, _ in asking])[0]
        if (pair := next(asking[worker], None)) is None:
            del asking[worker]
        else:
            got[worker].append(pair)
    for group, rank in everyone:
        assert got[group, rank] == got[group, 0] == sorted(got[group, 0])
    seen = Counter(pair for group in range(groups) for pair in got[group, 0])
    assert seen == Counter(product(range(epochs), range(batches)))


@given(few, st.integers(1, 2000))
@settings(max_examples=60)
def test_blocks_get_smaller_towards_the_end(groups: int, batches: int) -> None:
    table, sizes, left = Leases(groups, groups), [], batches
    places = dict.fromkeys(range(groups), 0)
    while left:
        group = min(places, key=lambda each: places[each])
        block = table.block(group, 0, Ask(0, 0, places[group], batches, 1))
        assert block.start == batches - left
        size = block.stop - block.start
        assert size in (1, MOST) or size <= left / groups / SPLIT
        places[group], left = block.after, left - size
        sizes.append(size)
    assert sizes == sorted(sizes, reverse=True) and max(sizes) <= MOST
    assert table.block(0, 0, Ask(0, 0, places[0], batches, 1)) == Block(places[0], batches, batches)


def test_an_answer_stays_what_it_was() -> None:
    table = Leases(2, 4)
    first, other = table.block(0, 0, Ask(0, 0, 0, 200, 8)), table.block(1, 0, Ask(0, 0, 0, 200, 8))
    following = table.block(0, 1, Ask(0, 0, first.after, 200, 8))
    assert (first, other, following) == (Block(0, 0, 12), Block(0, 12, 23), Block(12, 23, 34))
    for position in range(first.after, following.after):
        assert table.block(0, 0, Ask(0, 0, position, 200, 8)) == following
    assert table.block(0, 1, Ask(0, 0, 5, 200, 8)) == first
    assert table.block(0, 0, Ask(1, 0, 0, 200, 8)) == table.block(0, 0, Ask(0, 1, 0, 200, 8)) == first


def test_an_epoch_is_forgotten_once_everyone_is_in_a_later_one() -> None:
    table = Leases(2, 4)
    for epoch in range(5):
        for group, rank in product(range(2), range(2)):
            assert table.block(group, rank, Ask(0, epoch, 0, 4, 1)).start == group
    assert list(table._loaders[0].epochs) == [4]
    with pytest.raises(ProtocolError, match=r"worker 1\.0 goes back to epoch 3 of loader 0: all"):
        table.block(1, 0, Ask(0, 3, 0, 4, 1))
    table.block(0, 0, Ask(0, 9, 0, 4, 1))  # one that is far ahead
    assert table.block(1, 1, Ask(0, 4, 0, 4, 1)) == Block(0, 1, 2)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Ask(0, 0, 7, 90, 4), r"worker 0\.1 asks for batch 7 of epoch 0 of loader 0: its group has leased 5"),
        (Ask(0, 0, 0, 45, 8), r"worker 0\.1 has 45 batches of 8 samples in .* others have 90 of 4"),
        (Ask(0, 0, 0, 90, 5), r"has 90 batches of 5 samples"),
        (Ask(0, -1, 0, 90, 4), "by a negative number"),
    ],
)
def test_questions_that_cannot_be_right_are_refused(ask: Ask, said: str) -> None:
    table = Leases(2, 4)
    table.block(0, 0, Ask(0, 0, 0, 90, 4))
    with pytest.raises(ProtocolError, match=said):
        table.block(0, 1, ask)


class Written:
    """Writes down what is asked, by position and in order, and answers with blocks of three."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def request(self, ask: Ask) -> None:
        self.said.append(f"request {ask.position}")

    def block(self, ask: Ask) -> Block:
        self.said.append(f"block {ask.position}")
        return Block(ask.position, ask.position, min(ask.position + 3, ask.batches))


def test_the_next_block_is_asked_for_before_the_last_batch_of_the_present_one_is_handed_out() -> None:
    desk, dealt = Written(), [Batch((number,), 1) for number in range(8)]
    for batch in Tenant(lambda: desk).batches(0, 0, dealt, 1):
        desk.said.append(f"batch {batch.indices[0]}")
    assert desk.said == [
        *("block 0", "batch 0", "batch 1", "request 3", "batch 2"),
        *("block 3", "batch 3", "batch 4", "request 6", "batch 5"),
        *("block 6", "batch 6", "batch 7"),  # the epoch ends there, so nothing is asked for
    ]


# The loader.


class Group:
    """The loaders of a group's workers, drawn from in step."""

    def __init__(
        self, data: Any, group: int, table: Leases, workers: int = 1, groups: int = 2, **options: Any
    ):
        self.weights: list[list[int]] = [[] for _ in range(workers)]
        self.loaders = [
            make_loader(
                data,
                Place(0, groups, workers, group, rank),
                on_batch=self.weights[rank].append,
                tenant=Tenant(lambda rank=rank: Desk(table, (group, rank))),  # type: ignore[misc]
                **options,
            )
            for rank in range(workers)
        ]

    def epoch(self) -> Iterator[list[int]]:
        """The samples that count, of one batch of the group after the other."""
        for parts in zip(*self.loaders, strict=True):
            yield [
                sample
                for part, weights in zip(parts, self.weights, strict=True)
                for sample in part[: weights[-1]].tolist()
            ]


def pair(data: Any, workers: int = 1, **options: Any) -> list[Group]:
    table = Leases(2, 2 * workers)
    return [Group(data, group, table, workers, **options) for group in range(2)]


def interleaved(groups: list[Group], ahead: int = 4) -> list[list[list[int]]]:
    """An epoch of both groups, of which the first takes `ahead` batches for each of the second."""
    running = [group.epoch() for group in groups]
    got: list[list[list[int]]] = [[], []]
    while True:
        before = sum(map(len, got))
        got[0] += islice(running[0], ahead)
        got[1] += islice(running[1], 1)
        if sum(map(len, got)) == before:
            return got


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "one worker": (1, {"batch_size": 3}),
    "in order": (1, {"batch_size": 3, "shuffle": False}),
    "two workers": (2, {"batch_size": 2}),
    "sizes by rank": (2, {"batch_size": {0: 1, 1: 4}}),
    "processes": (2, {"batch_size": 2, "num_workers": 2}),
    "a sampler": (2, {"batch_size": 2, "sampler": list(range(110, 2, -1))}),
    "a drawn sampler": (2, {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 111, 99)}),
    "batches": (2, {"batch_sampler": [list(range(n, min(n + 5, 111))) for n in range(0, 111, 5)]}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_together_the_groups_get_the_epochs_of_one_group(name: str) -> None:
    workers, options = OPTIONS[name]
    alone = Group(range(111), 0, Leases(1, workers), workers, groups=1, **options)
    groups = pair(range(111), workers, **options)
    for _ in range(2):
        got = interleaved(groups)
        assert len(got[0]) > len(got[1]) > 0
        assert sorted(got[0] + got[1]) == sorted(alone.epoch())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_group_that_gets_everything_gets_what_is_dealt_to_a_single_one(name: str) -> None:
    workers, options = OPTIONS[name]
    first, second = pair(range(111), workers, **options)
    for rank, loader in enumerate(first.loaders):
        dealt = make_loader(range(111), Place(0, 1, workers, 0, rank), on_batch=lambda w: None, **options)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in dealt]
    assert list(second.epoch()) == []


def test_the_last_batch_is_dealt_evenly_and_who_has_none_repeats_one_at_weight_zero() -> None:
    groups = pair(range(9), 2, batch_size=2, shuffle=False)
    assert interleaved(groups, ahead=2) == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8]]]
    assert groups[1].weights == [[1], [0]]


def test_a_last_smaller_batch_may_be_left_out() -> None:
    groups = pair(range(9), 2, batch_size=2, shuffle=False, drop_last=True)
    assert interleaved(groups) == [[[0, 1, 2, 3], [4, 5, 6, 7]], []]


def test_each_server_group_leases_its_own_part() -> None:
    table, seen = [Leases(1, 1), Leases(1, 1)], []
    for part in range(2):
        tenant = Tenant(lambda part=part: Desk(table[part], (part, 0)), parts=2, part=part)  # type: ignore[misc]
        loader = make_loader(range(21), Place(0, 2, 1, part), on_batch=lambda w: None, tenant=tenant)
        seen.append([int(batch) for batch in loader])
    assert seen == [order(21, 0, 0, True)[part::2].tolist() for part in range(2)]


def test_a_loader_resumes_where_it_stands() -> None:
    first, second = pair(range(200), batch_size=2)
    loader, states, got = first.loaders[0], [], []
    for batch in islice(loader, 17):
        got.append(batch.tolist())
        states.append(loader.state_dict())
    whole = got + [batch.tolist() for batch in first_of(loader, states[16])]
    assert sorted(sample for batch in whole for sample in batch) == list(range(200))
    assert states[16] == {"epoch": 0, "position": 17}
    for at in (0, 5, 6, 16):  # within blocks and between them
        assert [batch.tolist() for batch in first_of(loader, states[at])] == whole[at + 1 :]
    assert list(second.epoch()) == []
    with pytest.raises(UsageError, match="cannot stand at epoch 0, position 101"):
        loader.load_state_dict({"epoch": 0, "position": 101})
    with pytest.raises(ProtocolError, match="its group has leased 0 here; a loader's state is for the run"):
        next(first_of(loader, {"epoch": 7, "position": 3}))


def first_of(loader: Loader, state: dict[str, Any]) -> Iterator[Any]:
    loader.load_state_dict(state)
    return iter(loader)


def test_endless_goes_on_where_it_was_left_and_over_epochs_that_others_have_taken() -> None:
    first, second = pair(range(40), batch_size=2)
    got = [batch.tolist() for batch in islice(first.loaders[0].endless(), 50)]
    assert first.loaders[0].state_dict() == {"epoch": 2, "position": 10}
    got.append(next(second.loaders[0].endless()).tolist())
    assert second.loaders[0].state_dict() == {"epoch": 2, "position": 1}
    got += [batch.tolist() for batch in islice(first.loaders[0].endless(), 9)]
    assert len({str(batch) for batch in got[40:]}) == 20
    assert first.loaders[0].state_dict() == {"epoch": 2, "position": 19}
    with pytest.raises(UsageError, match=r"no batches for worker 0\.0"):
        pair([])[0].loaders[0].endless()


def test_a_break_leaves_the_rest_to_the_other_group() -> None:
    first, second = pair(range(100), batch_size=2)
    got = list(islice(first.epoch(), 2))
    rest = list(second.epoch())
    assert len(rest) == 47  # but for the block of three that the first has
    assert not set(map(tuple, got)) & set(map(tuple, rest))
    assert len(list(islice(first.epoch(), 10))) == 10


def test_nobody_knows_the_length_beforehand() -> None:
    loader = pair(range(20))[0].loaders[0]
    with pytest.raises(TypeError, match="nobody knows the length of a range, batches are leased"):
        len(loader)
    assert len(list(loader)) == 20


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_stream_is_refused_unless_it_is_dealt() -> None:
    for data in (Stream(), DataLoader(Stream())):
        with pytest.raises(UsageError, match="a Stream, a stream, has no blocks") as caught:
            pair(data)
        assert re.search("data: dealt, or leased=False", caught.value.remedy or "")
        first, second = pair(data, leased=False)
        assert sorted([*first.epoch(), *second.epoch()]) == [[n] for n in range(8)]


def test_a_loader_may_be_dealt_where_others_are_leased() -> None:
    groups = pair(range(20), leased=False)
    assert [len(list(group.epoch())) for group in groups] == [10, 10]
