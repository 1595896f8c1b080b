"""What encoding does to numbers: sizes, bounds, and that nothing is lost where what is cut off is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.codecs import BLOCK, CODECS, Coded, Coding, decoded, encodable, move, wide
from shoal.config import Cluster
from shoal.errors import ProtocolError
from shoal.feedback import Residuals
from shoal.parameters import frames_of, received
from shoal.partition import Chunk, Piece

SIZES = (0, 1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5000)
LOSSY = tuple(CODECS)


def chunk_of(size: int, dtype: str = "float32", **fields: int) -> Chunk:
    return Chunk(0, 0, dtype, 0, size, 0, 0, (Piece(0, 0, size, 0),), **fields)


def coding(name: str) -> Coding:
    return Coding.of(Cluster(wire_dtype=name))  # type: ignore[arg-type]


def numbers(size: int, seed: int, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator, dtype=dtype)
    x *= torch.exp(spread * torch.randn(size, generator=generator, dtype=dtype))
    return torch.where(torch.rand(size, generator=generator) < 0.1, 0, x)


def peaks(x: Tensor) -> Tensor:
    """For each element, the largest of its block."""
    return torch.cat([part.abs().max().expand(len(part)) for part in x.split(BLOCK)]) if len(x) else x


def bound(name: str, x: Tensor) -> Tensor:
    """How far what is read back may be from each element."""
    match name:
        case "bfloat16":
            return x.abs() * 2**-8
        case "float16":
            return torch.maximum(x.abs() * 2**-11, peaks(x) * 2**-39)
        case "int8":
            return peaks(x) / 127 * 0.5001
    count = math.ceil(len(x) / 100)
    least = x.abs().sort(descending=True).values[count - 1] if count else x.sum()
    return torch.where(x.abs() > least, 0, least)


def nbytes(name: str, size: int) -> int:
    blocks = math.ceil(size / BLOCK)
    return {
        "bfloat16": 2 * size,
        "float16": 2 * size + 4 * blocks,
        "int8": size + 4 * blocks,
        "topk": 8 * math.ceil(size / 100),
    }[name]


@pytest.mark.parametrize("name", LOSSY)
@given(st.sampled_from(SIZES), st.integers(0, 1000), st.floats(0, 12))
def test_what_is_read_back_is_near(name: str, size: int, seed: int, spread: float) -> None:
    x, chunk = numbers(size, seed, spread), chunk_of(size)
    coded = coding(name).encode(x, chunk)
    assert sum(part.nbytes for part in coded.parts) == nbytes(name, size)
    back = decoded(coded, chunk)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert ((back - x).abs() <= bound(name, x)).all()


@pytest.mark.parametrize("name", LOSSY)
@given(st.sampled_from(SIZES), st.integers(0, 1000))
def test_what_is_cut_off_and_what_is_read_back_are_all_of_it(name: str, size: int, seed: int) -> None:
    x, chunk = numbers(size, seed), chunk_of(size)
    back = decoded(coding(name).encode(x, chunk), chunk)
    assert torch.equal((x - back) + back, x)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e20, 1e38])
def test_neither_the_smallest_nor_the_largest_numbers_break_it(name: str, scale: float) -> None:
    x, chunk = torch.linspace(-1, 1, 2001) * scale, chunk_of(2001)
    back = decoded(coding(name).encode(x, chunk), chunk)
    assert back.isfinite().all()
    assert (back - x).abs().max() <= scale


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    x, chunk = torch.ones(3000), chunk_of(3000)
    x[2500] = bad
    assert not decoded(coding(name).encode(x, chunk), chunk)[2500].isfinite()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_each_kind_of_parameter(name: str, dtype: str) -> None:
    chunk, kind = chunk_of(2000, dtype), getattr(torch, dtype)
    fits = kind.itemsize > {"bfloat16": 2, "float16": 2, "int8": 1, "topk": 0}[name]
    assert coding(name).applies(chunk) == fits
    if fits:
        x = numbers(2000, 1, dtype=torch.float64).to(kind).to(wide(kind))
        coded = coding(name).encode(x, chunk)
        back = decoded(coded, chunk)
        assert back.dtype == wide(kind)
        assert ((back - x).abs() <= bound(name, x) * 1.001).all()
        assert torch.equal(received(frames(coded), name, chunk, "worker 0.0"), back)


def test_what_travels_as_it_is() -> None:
    whole: tuple[Callable[[], Chunk], ...] = (
        lambda: chunk_of(9, "int64"),
        lambda: chunk_of(9, "bool"),
        lambda: chunk_of(9, "complex64"),
        lambda: chunk_of(9, buffer=0),
        lambda: chunk_of(9, row=3),
    )
    for make in whole:
        assert not any(encodable(make(), codec) for codec in CODECS.values())
    assert not coding("float32").applies(chunk_of(9, "float64"))


def frames(coded: Coded) -> list[bytes]:
    return [bytes(frame) for frame in frames_of(coded)]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", SIZES[1:])
def test_frames_of_another_size_are_refused(name: str, size: int) -> None:
    chunk = chunk_of(size)
    good = frames(coding(name).encode(torch.ones(size), chunk))
    assert received(good, name, chunk, "server 0.0").shape == (size,)
    wrong = [
        good[:-1],
        [*good, b""],
        [good[0] + b"\0\0\0\0", *good[1:]],
        [*good[:-1], good[-1] + b"\0\0\0\0"],
    ]
    for each in wrong:
        with pytest.raises(ProtocolError, match=r"server 0\.0 .* chunk 0"):
            received(each, name, chunk, "server 0.0")


def test_what_cannot_be_encoded_is_refused() -> None:
    coded = frames(coding("int8").encode(torch.ones(9), chunk_of(9)))
    for chunk in (chunk_of(9, "int64"), chunk_of(9, buffer=0), chunk_of(9, row=3)):
        with pytest.raises(ProtocolError, match="int8"):
            received(coded, "int8", chunk, "worker 0.0")
    with pytest.raises(ProtocolError, match="gzip"):
        received(coded, "gzip", chunk_of(9), "worker 0.0")
    far = torch.tensor([9], dtype=torch.int32), torch.ones(1)
    for index in (9, -1):
        far[0].fill_(index)
        with pytest.raises(ProtocolError, match="places"):
            received([bytes(f) for f in frames_of(Coded("topk", far))], "topk", chunk_of(9), "worker 0.0")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_differences_lead_to_the_values(name: str, dtype: str) -> None:
    """A server's differences to what a group has: those still to come hold all that was cut off so far."""
    chunk, kind = chunk_of(500, dtype), getattr(torch, dtype)
    code = coding(name)
    values, known = numbers(500, 3, 1.0, torch.float64).to(kind), torch.zeros(500, dtype=kind)
    for _ in range(120):
        move(known, decoded(code.encode(values.to(wide(kind)) - known, chunk), chunk))
    torch.testing.assert_close(known, values, rtol=1e-2, atol=1e-5)


# What a worker keeps of its gradients.


def pushed(kept: Residuals, chunk: Chunk, gradient: Tensor, touched: tuple[int, ...] = (0,)) -> Tensor:
    coded = kept.encode(chunk, gradient, touched)
    assert isinstance(coded, Coded)
    return decoded(coded, chunk)


@pytest.mark.parametrize("name", ["int8", "topk"])
@given(st.lists(st.integers(0, 99), min_size=1, max_size=8))
def test_gradients_arrive_in_full_in_the_end(name: str, seeds: list[int]) -> None:
    """Sum of what was pushed + residual = sum of the gradients: exact on integers."""
    chunk, kept = chunk_of(300), Residuals(coding(name))
    total, arrived = torch.zeros(300), torch.zeros(300)
    for seed in seeds:
        gradient = torch.randint(-99, 99, (300,), generator=torch.Generator().manual_seed(seed)).float()
        total += gradient
        arrived += pushed(kept, chunk, gradient)
        kept.settle({0}, {0})
    rest = pushed(Residuals(coding(name)), chunk, torch.zeros(300))  # of nothing, nothing
    assert not rest.any()
    torch.testing.assert_close(arrived + kept.of(chunk), total, rtol=0, atol=1e-3)


def test_only_the_share_that_counts_changes_what_is_kept() -> None:
    chunk, kept = chunk_of(300), Residuals(coding("int8"))
    first, second = numbers(300, 1), numbers(300, 2)
    pushed(kept, chunk, first)
    kept.settle({0}, {0})
    after = kept.of(chunk).clone()
    once = pushed(kept, chunk, second)
    assert torch.equal(pushed(kept, chunk, second), once)  # the share before is superseded
    assert torch.equal(kept.of(chunk), after)  # until the step is over
    kept.settle({0}, set())  # a step that is skipped, or to which the chunk contributes nothing
    assert torch.equal(kept.of(chunk), after)
    assert torch.equal(pushed(kept, chunk, second), once)
    kept.settle({0}, {0})
    assert not torch.equal(kept.of(chunk), after)
    kept.settle({0}, {0})  # nothing was pushed
    assert torch.equal(kept.of(chunk), after + second - once)


def test_a_gradient_that_is_not_finite_leaves_nothing_behind() -> None:
    chunk, kept = chunk_of(300), Residuals(coding("int8"))
    pushed(kept, chunk, torch.full((300,), math.nan))
    kept.settle({0}, set())
    assert not kept.of(chunk).any()


def test_what_belongs_to_untouched_pieces_stays() -> None:
    pieces = Piece(0, 0, 100, 0), Piece(1, 0, 200, 100)
    chunk, kept = Chunk(0, 0, "float32", 0, 300, 0, 0, pieces), Residuals(coding("int8"))
    pushed(kept, chunk, numbers(300, 1), (0, 1))
    kept.settle({0}, {0})
    before = kept.of(chunk).clone()
    gradient = numbers(300, 2)
    gradient[100:] = 0
    assert not pushed(kept, chunk, gradient, (0,))[100:].any()
    kept.settle({0}, {0})
    assert torch.equal(kept.of(chunk)[100:], before[100:])
    assert not torch.equal(kept.of(chunk)[:100], before[:100])


def test_what_is_kept_follows_the_loss_scale() -> None:
    chunk = chunk_of(300)
    kept, scaled = Residuals(coding("int8")), Residuals(coding("int8"))
    total, arrived = torch.zeros(300), torch.zeros(300)
    for step, scale in enumerate((1024.0, 1024.0, 512.0, 2048.0)):
        gradient = numbers(300, step, 1.0)
        total += gradient
        arrived += pushed(scaled, chunk, gradient * scale) / scale
        scaled.settle({0}, {0}, scale)
        pushed(kept, chunk, gradient)
        kept.settle({0}, {0})
    torch.testing.assert_close(arrived + scaled.of(chunk) / 2048, total, rtol=1e-5, atol=1e-5)
