"""Every sample counts once per epoch, whoever sees it."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count, islice, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sampling import Batch, Place, deal, deal_whole, order, seed_of, shard, turns

small = st.integers(1, 5)


def everyone(
    sequence: np.ndarray, groups: int, workers: int, batch_size: int, drop_last: bool = False
) -> list[list[list[Batch]]]:
    """Batches by group and rank."""
    return [
        [
            list(deal(sequence, Place(0, groups, workers, group, rank), [batch_size] * workers, drop_last))
            for rank in range(workers)
        ]
        for group in range(groups)
    ]


def joined(workers: list[list[Batch]], number: int) -> list[int]:
    """The samples that count in a group's batch, in order of ranks."""
    return [sample for batches in workers for sample in batches[number].indices[: batches[number].weight]]


@given(st.integers(0, 200), st.integers(), st.integers(0, 99), st.booleans(), small, small, small)
@settings(max_examples=300, deadline=None)
def test_every_sample_counts_once(
    samples: int, seed: int, epoch: int, shuffle: bool, groups: int, workers: int, batch_size: int
) -> None:
    dealt = everyone(order(samples, seed, epoch, shuffle), groups, workers, batch_size)
    seen = Counter(
        sample
        for group in dealt
        for batches in group
        for batch in batches
        for sample in batch.indices[: batch.weight]
    )
    assert seen == Counter(range(samples))


@given(st.integers(0, 200), small, small, small, st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_groups_batches_are_consecutive_parts_of_its_list(
    samples: int, groups: int, workers: int, batch_size: int, drop_last: bool
) -> None:
    sequence = order(samples, 7, 3, True)
    for group, ranks in enumerate(everyone(sequence, groups, workers, batch_size, drop_last)):
        mine = sequence[group::groups].tolist()
        joint = workers * batch_size
        parts = [mine[at : at + joint] for at in range(0, len(mine), joint)]
        if drop_last and parts and len(parts[-1]) < joint:
            parts.pop()
        assert {len(batches) for batches in ranks} == {len(parts)}
        assert [joined(ranks, number) for number in range(len(parts))] == parts
        for number, part in enumerate(parts):
            weights = [batches[number].weight for batches in ranks]
            assert weights == sorted(weights, reverse=True) and max(weights) - min(weights) <= 1
            for batches in ranks:
                batch = batches[number]
                assert len(batch.indices) == max(batch.weight, 1) and set(batch.indices) <= set(part)


def shares(sizes: list[int], samples: int) -> list[int]:
    return np.bincount(turns(sizes)[:samples], minlength=len(sizes)).tolist()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_smaller_batch_is_split_in_proportion_as_evenly_as_it_goes(sizes: list[int]) -> None:
    def uneven(split: tuple[int, ...] | list[int], samples: int) -> float:
        return sum(
            size * (own / size - samples / sum(sizes)) ** 2 for own, size in zip(split, sizes, strict=True)
        )

    splits = list(product(*(range(size + 1) for size in sizes)))
    for samples in range(sum(sizes) + 1):
        best = min(uneven(split, samples) for split in splits if sum(split) == samples)
        ours = shares(sizes, samples)
        assert tuple(ours) in splits and uneven(ours, samples) <= best + 1e-9


def test_known_turns() -> None:
    assert turns([2, 2, 2]).tolist() == [0, 1, 2, 0, 1, 2]
    assert turns([1, 3]).tolist() == [1, 0, 1, 1]
    assert shares([16, 128], 72) == [8, 64]


@given(st.integers(0, 150), small, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_workers_of_unlike_sizes(samples: int, groups: int, sizes: list[int], drop_last: bool) -> None:
    workers, joint, names = len(sizes), sum(sizes), [str(number) for number in range(samples)]
    for group in range(groups):
        places = [Place(0, groups, workers, group, rank) for rank in range(workers)]
        ranks = [list(deal(names, place, sizes, drop_last)) for place in places]
        mine = names[group::groups]
        parts = [mine[at : at + joint] for at in range(0, len(mine), joint)]
        if drop_last and parts and len(parts[-1]) < joint:
            parts.pop()
        assert {len(batches) for batches in ranks} == {len(parts)}
        for number, part in enumerate(parts):
            assert joined(ranks, number) == part
            weights = [batches[number].weight for batches in ranks]
            assert weights == shares(sizes, len(part))
            for batches in ranks:
                assert len(batches[number].indices) == max(batches[number].weight, 1)
                assert set(batches[number].indices) <= set(part)


@given(st.integers(0, 30), small, small)
@settings(max_examples=100, deadline=None)
def test_batches_of_the_users_are_dealt_whole(number: int, groups: int, workers: int) -> None:
    batches = [[f"{name}.{sample}" for sample in range(name % 4 + 1)] for name in range(number)]
    seen = []
    for group in range(groups):
        ranks = [deal_whole(batches, Place(0, groups, workers, group, rank)) for rank in range(workers)]
        assert len({len(dealt) for dealt in ranks}) == 1
        for rank, dealt in enumerate(ranks):
            assert all(list(batch.indices) in batches for batch in dealt)
            assert all(batch.weight == len(batch.indices) for batch in dealt[:-1])
            own = [list(batch.indices) for batch in dealt if batch.weight]
            assert own == batches[group + rank * groups :: groups * workers]
            seen += own
    assert sorted(seen) == sorted(batches)


def test_a_shard_is_every_nth_item_and_reads_no_further_than_asked() -> None:
    assert [list(shard("abcdefg", rank, 3)) for rank in range(3)] == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert list(islice(shard(count(), 2, 5), 3)) == [2, 7, 12]


def test_a_known_deal() -> None:
    dealt = everyone(np.arange(11), 2, 2, 2)
    assert [[[(b.indices, b.weight) for b in batches] for batches in group] for group in dealt] == [
        [[((0, 2), 2), ((8,), 1)], [((4, 6), 2), ((10,), 1)]],
        [[((1, 3), 2), ((9,), 1)], [((5, 7), 2), ((9,), 0)]],
    ]


def test_a_group_without_samples_has_no_batches() -> None:
    assert [len(ranks[0]) for ranks in everyone(np.arange(2), 3, 2, 1)] == [1, 1, 0]


def test_batches_are_a_sequence() -> None:
    batches = deal(np.arange(7), Place(), [3])
    assert len(batches) == 3
    assert batches[-1] == batches[2] == Batch((6,), 1)
    assert batches[1:] == [Batch((3, 4, 5), 3), Batch((6,), 1)] == list(batches)[1:]
    assert all(type(index) is int for batch in batches for index in batch.indices)
    with pytest.raises(IndexError):
        batches[3]


def test_orders_differ_by_seed_and_epoch_only() -> None:
    orders = {tuple(order(50, seed, epoch, True)) for seed in (-1, 0, 1, 2**40) for epoch in range(5)}
    assert len(orders) == 20
    assert order(50, 3, 4, True).tolist() == order(50, 3, 4, True).tolist()
    assert order(5, 3, 4, False).tolist() == [0, 1, 2, 3, 4]
    assert order(5, 3, 4, True).dtype == order(5, 3, 4, False).dtype == np.int64


def test_the_order_stays_what_it_was() -> None:
    assert order(8, 0, 0, True).tolist() == [5, 6, 4, 1, 7, 0, 3, 2]


def test_order_leaves_numpys_generator_alone() -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    order(100, 1, 1, True)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


def test_seeds_differ_by_every_part_of_the_path() -> None:
    paths = [(0,), (-1, 0), (1, 0), (0, 0, 1), (0, 1, 0), (0, 1), (0, 0, 0, 1)]
    seeds = {seed_of(*path) for path in paths}
    assert len(seeds) == len(paths) and all(0 <= seed < 2**63 for seed in seeds)


def test_a_million_samples_are_dealt_in_well_under_a_second() -> None:
    began = time.perf_counter()
    batches = deal(order(1_000_000, 0, 0, True), Place(0, 3, 2, 2, 1), [1, 1])
    assert len(batches) == 166_667 and batches[100_000].weight == 1
    assert time.perf_counter() - began < 0.5
