"""The plan: everything is somewhere exactly once, evenly, and the same on every member."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.partition import ITEMSIZE, Buffer, Chunk, Parameter, Plan, difference, make_plan, singa

GOLDEN = json.loads((Path(__file__).parent / "data" / "slicer_golden.json").read_text())
DTYPES = ["float32", "float64", "bfloat16", "complex128"]

shapes = st.one_of(
    st.tuples(st.integers(0, 3000)),
    st.tuples(st.integers(1, 300), st.integers(0, 300)),
    st.just(()),
)


@st.composite
def models(draw: st.DrawFn, whole: bool = True) -> tuple[Parameter, ...]:
    kinds = draw(
        st.lists(
            st.tuples(
                shapes, st.sampled_from(DTYPES), st.integers(0, 1), st.booleans() if whole else st.just(False)
            ),
            max_size=12,
        )
    )
    return tuple(
        Parameter(f"p{index}", shape, dtype, optimizer, 0, kept)
        for index, (shape, dtype, optimizer, kept) in enumerate(kinds)
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    buffers = draw(st.lists(st.tuples(shapes, st.sampled_from(["float32", "int64", "bool"])), max_size=5))
    return make_plan(
        draw(models()),
        tuple(Buffer(f"b{index}", shape, dtype) for index, (shape, dtype) in enumerate(buffers)),
        draw(st.integers(1, 7)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(["balanced", "singa"])),
        draw(st.sampled_from([1, 256, 1000, 4096, 262144])),
    )


def loads(plan: Plan) -> list[int]:
    """Bytes of parameters on each server."""
    totals = [0] * plan.servers
    for s in plan.slices:
        totals[s.server] += (s.stop - s.start) * ITEMSIZE[plan.parameters[s.parameter].dtype]
    return totals


def atom_bytes(parameter: Parameter) -> int:
    return parameter.nbytes if parameter.whole else min(64, parameter.numel) * ITEMSIZE[parameter.dtype]


def assert_tiles(ranges: Iterable[tuple[int, int]], size: int) -> None:
    """The ranges, in their order, cover [0, size) without gap or overlap, and none is empty."""
    at = 0
    for start, stop in ranges:
        assert start == at < stop
        at = stop
    assert at == size


# Completeness.


@given(plans())
@settings(max_examples=300, deadline=None)
def test_every_element_is_in_exactly_one_slice_and_one_piece(plan: Plan) -> None:
    slices, pieces = defaultdict(list), defaultdict(list)
    for s in plan.slices:
        slices[s.parameter].append((s.start, s.stop))
        assert 0 <= s.server < plan.servers and 0 <= s.master < plan.server_groups
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            pieces[piece.parameter].append((piece.start, piece.stop))
    for index, parameter in enumerate(plan.parameters):
        assert_tiles(slices[index], parameter.numel)
        assert_tiles(sorted(pieces[index]), parameter.numel)


@given(plans())
@settings(max_examples=300, deadline=None)
def test_chunks_tile_the_spaces_and_pieces_tile_the_chunks(plan: Plan) -> None:
    assert [chunk.number for chunk in plan.chunks] == list(range(len(plan.chunks)))
    assert [c for server in range(plan.servers) for c in plan.chunks_of(server)] == list(plan.chunks)
    for server in range(plan.servers):
        spaces = defaultdict(list)
        for chunk in plan.chunks_of(server):
            spaces[chunk.dtype].append(chunk)
        assert list(spaces) == list(plan.spaces(server))
        assert [c.number for space in spaces.values() for c in space] == [
            c.number for c in plan.chunks_of(server)
        ]
        for dtype, space in spaces.items():
            assert_tiles(((chunk.start, chunk.stop) for chunk in space), plan.spaces(server)[dtype])
    for chunk in plan.chunks:
        assert chunk.nbytes == chunk.size * ITEMSIZE[chunk.dtype]
        if chunk.buffer is None:
            assert_tiles(((p.at, p.at + p.stop - p.start) for p in chunk.pieces), chunk.size)
        else:
            assert chunk.pieces == () and chunk.size == plan.buffers[chunk.buffer].numel


@given(plans())
@settings(max_examples=300, deadline=None)
def test_a_chunk_agrees_with_its_pieces(plan: Plan) -> None:
    homes = defaultdict(list)
    for s in plan.slices:
        homes[s.parameter].append(s)
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            parameter = plan.parameters[piece.parameter]
            assert (parameter.dtype, parameter.optimizer) == (chunk.dtype, chunk.optimizer)
            (home,) = (s for s in homes[piece.parameter] if s.start <= piece.start and piece.stop <= s.stop)
            assert (home.server, home.master) == (chunk.server, chunk.master)
            if parameter.whole:
                assert (piece.start, piece.stop) == (0, parameter.numel)


# Size of chunks.


@given(models(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 300, 5000]))
@settings(max_examples=200, deadline=None)
def test_chunks_keep_to_their_size_and_are_cut_only_where_they_must(
    parameters: tuple[Parameter, ...], servers: int, groups: int, limit: int
) -> None:
    plan = make_plan(parameters, (), servers, groups, chunk_bytes=limit)
    for chunk in plan.chunks:
        room = max(64, limit // ITEMSIZE[chunk.dtype] // 64 * 64)
        alone = len(chunk.pieces) == 1 and parameters[chunk.pieces[0].parameter].whole
        assert chunk.size <= room or alone
    for before, after in pairwise(plan.chunks):
        if (before.server, before.dtype) != (after.server, after.dtype):
            continue
        room = max(64, limit // ITEMSIZE[after.dtype] // 64 * 64)
        first = after.pieces[0]
        whole = parameters[first.parameter].whole
        need = first.stop - first.start if whole else min(64, first.stop - first.start)
        changed = (before.optimizer, before.master) != (after.optimizer, after.master)
        assert changed or before.size + need > room


def test_a_large_whole_parameter_is_one_chunk_and_small_ones_share() -> None:
    parameters = [
        Parameter("a", (100,), "float32"),
        Parameter("w", (1000,), "float32", whole=True),
        Parameter("u", (10,), "float32", whole=True),
        Parameter("v", (10,), "float32", whole=True),
        Parameter("c", (200,), "float32"),
    ]
    plan = make_plan(parameters, (), 1, chunk_bytes=512)
    assert [[(p.parameter, p.start, p.stop) for p in c.pieces] for c in plan.chunks] == [
        [(0, 0, 100)],
        [(1, 0, 1000)],
        [(2, 0, 10), (3, 0, 10), (4, 0, 108)],
        [(4, 108, 200)],
    ]


def test_a_known_plan() -> None:
    parameters = [Parameter("w", (4, 64), "float32"), Parameter("b", (4,), "float64")]
    buffers = [Buffer("mean", (4,), "float32"), Buffer("none", (0,), "int64"), Buffer("count", (), "int64")]
    plan = make_plan(parameters, buffers, 2, 2, chunk_bytes=256)
    assert [(s.parameter, s.start, s.stop, s.server, s.master) for s in plan.slices] == [
        (0, 0, 64, 0, 0),
        (0, 64, 128, 1, 0),
        (0, 128, 192, 0, 1),
        (0, 192, 256, 1, 1),
        (1, 0, 4, 0, 1),
    ]
    assert [(c.server, c.dtype, c.start, c.stop, c.master, c.buffer) for c in plan.chunks] == [
        (0, "float32", 0, 64, 0, None),
        (0, "float32", 64, 128, 1, None),
        (0, "float32", 128, 132, 0, 0),
        (0, "float64", 0, 4, 1, None),
        (1, "float32", 0, 64, 0, None),
        (1, "float32", 64, 128, 1, None),
        (1, "int64", 0, 1, 1, 2),
    ]
    assert list(plan.spaces(0).items()) == [("float32", 132), ("float64", 4)]
    assert list(plan.spaces(1).items()) == [("float32", 128), ("int64", 1)]


# Balance.


@given(models(), st.integers(1, 9))
@settings(max_examples=500, deadline=None)
def test_balanced_is_within_one_atom(parameters: tuple[Parameter, ...], servers: int) -> None:
    plan = make_plan(parameters, (), servers)
    bytes_on, filled = loads(plan), [p for p in parameters if p.numel]
    if not filled:
        assert plan.slices == () and plan.chunks == ()
        return
    largest = max(atom_bytes(p) for p in filled)
    assert sum(bytes_on) == sum(p.nbytes for p in parameters)
    assert max(bytes_on) - min(bytes_on) <= largest
    if sum(bytes_on) >= 11 * largest * servers:
        assert max(bytes_on) <= 1.1 * min(bytes_on)
    free = [p for p in filled if not p.whole]
    if free:
        holders = {s.server for s in plan.slices if not parameters[s.parameter].whole}
        assert max(bytes_on[n] for n in holders) - min(bytes_on) <= max(atom_bytes(p) for p in free)


@given(models(), st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any), st.integers(1, 3))
@settings(max_examples=500, deadline=None)
def test_weights_give_parts_within_one_atom(
    parameters: tuple[Parameter, ...], weights: list[int], groups: int
) -> None:
    plan = make_plan(parameters, (), len(weights), groups, weights=weights)
    largest = max((atom_bytes(p) for p in parameters if p.numel), default=0)
    volume = sum(p.nbytes for p in parameters)
    for held, weight in zip(loads(plan), weights, strict=True):
        assert abs(held - volume * weight / sum(weights)) <= largest + 1
        assert weight or not held


@given(models(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_equal_weights_are_none(
    parameters: tuple[Parameter, ...], servers: int, groups: int, weight: int
) -> None:
    plan = make_plan(parameters, (), servers, groups)
    assert make_plan(parameters, (), servers, groups, weights=[weight] * servers).digest == plan.digest


@given(models(), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_balanced_cuts_only_between_atoms(
    parameters: tuple[Parameter, ...], servers: int, groups: int
) -> None:
    slices = make_plan(parameters, (), servers, groups).slices
    homes = [(s.parameter, s.server, s.master) for s in slices]
    assert all(one != other for one, other in pairwise(homes))
    for s in slices:
        assert s.start % 64 == 0
        assert s.stop % 64 == 0 or s.stop == parameters[s.parameter].numel
        if parameters[s.parameter].whole:
            assert (s.start, s.stop) == (0, parameters[s.parameter].numel)


@given(models(), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_masters_divide_each_shard_evenly_and_in_order(
    parameters: tuple[Parameter, ...], servers: int, groups: int
) -> None:
    plan = make_plan(parameters, (), servers, groups)
    for server, total in enumerate(loads(plan)):
        shard = [s for s in plan.slices if s.server == server]
        masters = [s.master for s in shard]
        assert masters == sorted(masters)
        largest = max((atom_bytes(parameters[s.parameter]) for s in shard), default=0)
        for bound in range(1, groups):
            below = [s for s in shard if s.master < bound]
            size = sum((s.stop - s.start) * ITEMSIZE[parameters[s.parameter].dtype] for s in below)
            assert abs(size - total * bound / groups) <= largest + 16  # 16: the widest element


def test_slices_stay_few() -> None:
    parameters = [Parameter(f"p{index}", (1000, 1000), "float32") for index in range(12)]
    plan = make_plan(parameters, (), 8, chunk_bytes=1 << 20)
    stripes = sum(parameter.nbytes for parameter in parameters) / (1 << 20)
    assert len(plan.slices) <= len(parameters) + stripes + 2 * 8
    assert len(plan.chunks) <= stripes + 2 * 8
    assert max(loads(plan)) <= 1.001 * min(loads(plan))


def test_neighbours_in_the_model_keep_all_servers_busy() -> None:
    """What comes at one time, some layers' gradients, is not all one server's."""
    parameters = [Parameter(f"p{index}", (512, 512), "float32") for index in range(10)]
    for weights in ([1, 1, 1, 1], [1, 1, 1, 1, 3, 3]):
        plan = make_plan(parameters, (), len(weights), chunk_bytes=1 << 16, weights=weights)
        for first in range(8):
            near = [s for s in plan.slices if first <= s.parameter < first + 3]
            part = [sum(s.stop - s.start for s in near if s.server == n) for n in range(len(weights))]
            for size, weight in zip(part, weights, strict=True):
                assert abs(size / sum(part) - weight / sum(weights)) < 0.05


@pytest.mark.parametrize("before", [0, 1, 999, 12_345])
def test_a_table_is_cut_once_per_server(before: int) -> None:
    parameters = [Parameter("p", (before,), "float32"), Parameter("t", (4001, 60), "float32", row=60)]
    parameters.append(Parameter("q", (100_000,), "float32"))
    plan = make_plan(parameters, (), 4, chunk_bytes=1 << 14)
    table = [s for s in plan.slices if s.parameter == 1]
    assert sorted(s.server for s in table) == [0, 1, 2, 3]
    assert max(s.stop - s.start for s in table) - min(s.stop - s.start for s in table) <= 4 * 60
    assert sum(chunk.row > 0 for chunk in plan.chunks) == 4


@pytest.mark.parametrize("chunk_bytes", [1 << 17, 1 << 20])
def test_a_chunk_is_one_region_of_the_model_whatever_the_shapes(chunk_bytes: int) -> None:
    parameters = [Parameter(f"p{index}", (1000, 1001), "float32") for index in range(20)]
    plan = make_plan(parameters, (), 4, chunk_bytes=chunk_bytes)

    def torn(chunk: Chunk) -> bool:
        pairs = zip(chunk.pieces, chunk.pieces[1:], strict=False)
        return any(a.stop != parameters[a.parameter].numel or b.start for a, b in pairs)

    assert sum(map(torn, plan.chunks)) <= 4  # each server's last one


@given(models(), st.integers(1, 5), st.integers(1, 3), st.sampled_from(["balanced", "singa"]))
@settings(max_examples=100, deadline=None)
def test_names_do_not_matter_to_the_places(
    parameters: tuple[Parameter, ...], servers: int, groups: int, slicer: str
) -> None:
    renamed = tuple(replace(p, name=f"z{len(parameters) - index}") for index, p in enumerate(parameters))
    one, other = (make_plan(ps, (), servers, groups, slicer) for ps in (parameters, renamed))
    assert (one.slices, one.chunks) == (other.slices, other.chunks)


def test_buffers_are_spread_and_their_masters_take_turns() -> None:
    buffers = [Buffer(f"b{index}", (8,), "float32", optimizer=index % 2) for index in range(6)]
    chunks = make_plan((), buffers, 3, 2).chunks
    assert sorted((c.server, c.buffer) for c in chunks) == [(0, 0), (0, 3), (1, 1), (1, 4), (2, 2), (2, 5)]
    assert [c.master for c in sorted(chunks, key=lambda c: c.buffer or 0)] == [0, 1, 0, 1, 0, 1]
    assert all(c.optimizer == buffers[c.buffer or 0].optimizer for c in chunks)


# SINGA's slicer.

CUTS = [(net, boxes) for net, row in GOLDEN.items() for boxes in row["cuts"]]
BOXES = [(net, index) for net, row in GOLDEN.items() for index in range(len(row["boxes"]))]


@pytest.mark.parametrize(("net", "boxes"), CUTS)
def test_singa_cuts_as_recorded(net: str, boxes: str) -> None:
    sizes = GOLDEN[net]["sizes"]
    assert singa.cut(int(boxes), sizes, [False] * len(sizes)) == GOLDEN[net]["cuts"][boxes]


@pytest.mark.parametrize(("net", "index"), BOXES)
def test_singa_boxes_as_recorded(net: str, index: int) -> None:
    case = GOLDEN[net]["boxes"][index]
    lengths = [length for run in GOLDEN[net]["cuts"][case["cut"]] for length in run]
    chosen = singa.boxes_of(case["boxes"], lengths)
    if case["chosen"] is None:  # the original did not end
        assert chosen == sorted(chosen) and set(chosen) <= set(range(case["boxes"]))
    else:
        assert chosen == [min(box, case["boxes"] - 1) for box in case["chosen"]]


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([90, 20, 90], [0, 0, 1]),  # room for 10 and a tenth of the average, 10
        ([90, 21, 89], [0, 1, 1]),
        ([100, 20], [0, 1]),  # an empty box takes what exceeds it
        ([50, 50, 50, 50, 100], [0, 0, 0, 1, 1]),
    ],
)
def test_singa_boxes_by_hand(lengths: list[int], chosen: list[int]) -> None:
    assert singa.boxes_of(2, lengths) == chosen


def test_singa_uses_lcm_boxes_servers_and_masters() -> None:
    sizes, lengths = GOLDEN["mnist_mlp"]["sizes"], GOLDEN["mnist_mlp"]["cuts"]["6"]
    plan = make_plan([Parameter(str(n), (n,), "float32") for n in sizes], (), 2, 3, "singa")
    cuts = [[s.stop - s.start for s in plan.slices if s.parameter == index] for index in range(len(sizes))]
    recorded = {row["boxes"]: row["chosen"] for row in GOLDEN["mnist_mlp"]["boxes"] if row["cut"] == "6"}
    assert cuts == lengths
    assert [s.server for s in plan.slices] == recorded[2]
    assert [s.master for s in plan.slices] == recorded[3]


@given(
    st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=10),
    st.integers(1, 12),
    st.integers(1, 12),
)
@settings(max_examples=500, deadline=2000)
def test_singa_always_ends_with_servers_that_exist(
    kinds: list[tuple[int, bool]], servers: int, groups: int
) -> None:
    parameters = [Parameter(f"p{n}", (size,), "float32", whole=kept) for n, (size, kept) in enumerate(kinds)]
    plan = make_plan(parameters, (), servers, groups, "singa")
    for s in plan.slices:
        assert 0 <= s.server < servers and 0 <= s.master < groups and s.start < s.stop
        if parameters[s.parameter].whole:
            assert s.stop - s.start == parameters[s.parameter].numel


# Identity.


@given(plans())
@settings(max_examples=100, deadline=None)
def test_a_plan_survives_its_encoding(plan: Plan) -> None:
    digest = plan.digest
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert again == plan and again.digest == digest
    assert len(digest) == 64 and int(digest, 16) >= 0


def test_the_digest_changes_with_anything() -> None:
    parameters = (Parameter("w", (300,), "float32"), Parameter("v", (10,), "float32", whole=True))
    plan = make_plan(parameters, (Buffer("b", (3,), "int64"),), 2, 2)
    assert plan.digest == make_plan(parameters, (Buffer("b", (3,), "int64"),), 2, 2).digest
    other = {"name": "x", "shape": (1,), "dtype": "bool", "whole": True, "buffer": 9, "pieces": ()}
    seen = [plan.digest, replace(plan, servers=3).digest, replace(plan, server_groups=3).digest]
    for rows in ("parameters", "buffers", "slices", "chunks"):
        row = getattr(plan, rows)[0]
        for entry in fields(row):
            value = other.get(entry.name, 77)
            assert value != getattr(row, entry.name)
            changes: dict[str, Any] = {rows: (replace(row, **{entry.name: value}), *getattr(plan, rows)[1:])}
            seen.append(replace(plan, **changes).digest)
    piece = plan.chunks[0].pieces[0]
    for entry in fields(piece):
        chunk = replace(plan.chunks[0], pieces=(replace(piece, **{entry.name: 77}),))
        seen.append(replace(plan, chunks=(chunk, *plan.chunks[1:])).digest)
    assert len(set(seen)) == len(seen)


W, B = Parameter("w", (2, 3), "float32"), Parameter("b", (2,), "float32")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([W, B], None),
        ([W], "missing: b"),
        ([W, B, replace(B, name="c")], "extra: c"),
        ([W, replace(B, name="c")], "missing: b"),
        ([B, W], "another order: b in the place of w"),
        ([W, B, B], "3 entries instead of 2"),
        ([replace(W, shape=(3, 2)), B], "w: shape (3, 2) instead of (2, 3)"),
        ([W, replace(B, dtype="float64")], "b: dtype float64 instead of float32"),
        ([W, replace(B, optimizer=1)], "b: optimizer 1 instead of 0"),
        ([W, replace(B, settings=1)], "b: settings 1 instead of 0"),
        ([W, replace(B, whole=True)], "b: whole True instead of False"),
    ],
)
def test_the_first_difference_in_words(other: list[Parameter], words: str | None) -> None:
    assert difference([W, B], other) == words


def test_a_difference_names_three_at_most() -> None:
    buffers = [Buffer(f"b{index}", (), "int64") for index in range(5)]
    assert difference(buffers, []) == "missing: b0, b1, b2 and 2 more"
    assert difference(buffers, [*buffers[:-1], replace(buffers[-1], dtype="bool")]) == (
        "b4: dtype bool instead of int64"
    )


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"servers": 0}, "servers = 0"),
        ({"server_groups": 0}, "server_groups = 0"),
        ({"chunk_bytes": -1}, "chunk_bytes = -1"),
        ({"slicer": "fair"}, "'fair'"),
        ({"slicer": "singa", "weights": [1]}, "singa knows no weights"),
        ({"weights": [1, 1]}, r"weights \[1, 1\] for 1 servers"),
        ({"servers": 2, "weights": [2, -1]}, r"weights \[2, -1\] for 2 servers"),
        ({"servers": 2, "weights": [0, 0]}, r"weights \[0, 0\] for 2 servers"),
        ({"parameters": [Parameter("w", (1,), "float8_e5m2")]}, "w has dtype float8_e5m2"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict[str, object], word: str) -> None:
    given_ = {"parameters": [W], "buffers": (), "servers": 1} | arguments
    with pytest.raises(UsageError, match=word) as caught:
        make_plan(**given_)  # type: ignore[arg-type]
    assert caught.value.remedy


def test_sizes_match_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, size in ITEMSIZE.items():
        assert torch.empty((), dtype=getattr(torch, name)).element_size() == size


def test_a_large_model_is_planned_quickly() -> None:
    parameters = [Parameter(f"p{index}", (4096, 4096), "bfloat16") for index in range(200)]
    plan = make_plan(parameters, (), 8, 2)
    assert sum(chunk.size for chunk in plan.chunks) == 200 * math.prod((4096, 4096))


def test_turns_after_a_table_are_as_long_as_before_it() -> None:
    table = Parameter("t", (4000, 64), "float32", row=64)
    parameters = [Parameter("p", (100_000,), "float32"), table, Parameter("q", (100_000,), "float32")]
    plan = make_plan(parameters, (), 4, chunk_bytes=1 << 14)
    for number in (0, 2):
        parts = [s for s in plan.slices if s.parameter == number]
        assert max(s.stop - s.start for s in parts) <= 1 << 12
        assert all(a.server != b.server for a, b in pairwise(parts))


def test_what_is_left_over_does_not_go_to_a_server_without_a_part() -> None:
    plan = make_plan([Parameter("p", (193,), "bfloat16")], (), 4, weights=(0, 1, 1, 1))
    assert loads(plan)[0] == 0


def test_whole_parameters_are_placed_the_largest_first() -> None:
    sizes = (1, 1, 1, 1, 4)
    plan = make_plan([Parameter(f"p{n}", (100 * n,), "float32", whole=True) for n in sizes], (), 2)
    assert loads(plan) == [1600, 1600]
