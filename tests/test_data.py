"""The loader hands each worker its samples, once, resumably, and leaves torch's generator alone."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import active_children
from select import select
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    get_worker_info,
)

from shoal.data import Loader, Place, make_loader
from shoal.errors import UsageError

PLACE = ("seed", "groups", "workers", "group", "rank")


def loader_of(data: Any, on_batch: Callable[[int], None] = lambda weight: None, **options: Any) -> Loader:
    place = {name: options.pop(name) for name in PLACE if name in options}
    return make_loader(data, Place(**place), on_batch=on_batch, **options)


def epoch_of(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


class Noise(Dataset[torch.Tensor]):
    """Random numbers, drawn where the sample is fetched."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


class Sized:
    def __len__(self) -> int:
        return 3


# What comes.


@pytest.mark.parametrize("processes", [0, 2])
def test_all_workers_together_see_every_sample_once_an_epoch(processes: int) -> None:
    counted: Counter[int] = Counter()
    for group in range(2):
        lengths = set()
        for rank in range(3):
            weights: list[int] = []
            loader = loader_of(
                list(range(29)), weights.append, groups=2, workers=3, group=group, rank=rank,
                batch_size=2, num_workers=processes,
            )  # fmt: skip
            lengths.add(len(loader))
            for _ in range(2):
                for number, batch in enumerate(loader, 1):
                    assert len(weights) == number  # told before the batch is handed out, and only then
                    assert weights[-1] in (len(batch), 0)
                    counted.update(batch[: weights[-1]].tolist())
                assert number == len(loader)
                weights.clear()
        assert len(lengths) == 1
    assert counted == Counter({sample: 2 for sample in range(29)})


def test_a_worker_without_samples_repeats_one_at_weight_zero() -> None:
    weights: list[int] = []
    loader = loader_of(list(range(5)), weights.append, workers=2, rank=1, batch_size=2, shuffle=False)
    assert epoch_of(loader) == [[2, 3], [4]]
    assert weights == [2, 0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_may_have_batches_of_their_own_size(drop_last: bool) -> None:
    options: dict[str, Any] = {"batch_size": {1: 7, 0: 2, 2: 1}, "drop_last": drop_last}
    counted: Counter[int] = Counter()
    for group in range(2):
        loaders = [
            loader_of(range(57), groups=2, workers=3, group=group, rank=rank, **options) for rank in range(3)
        ]
        assert [loader.batch_size for loader in loaders] == [2, 7, 1]
        epochs = [epoch_of(loader) for loader in loaders]
        assert {len(epoch) for epoch in epochs} == {2 if drop_last else 3}
        assert [[len(batch) for batch in epoch[:2]] for epoch in epochs] == [[2, 2], [7, 7], [1, 1]]
        counted.update(sample for epoch in epochs for batch in epoch for sample in batch)
    assert set(counted.values()) == {1} and len(counted) == (40 if drop_last else 57)


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_fewer_samples_than_workers(samples: int) -> None:
    for rank in range(3):
        weights: list[int] = []
        loader = loader_of(list(range(samples)), weights.append, workers=3, rank=rank, batch_size=4)
        batches = epoch_of(loader)
        assert len(loader) == len(batches) == (samples > 0)
        assert weights == [int(rank < samples)] * (samples > 0)
        assert all(len(batch) == 1 for batch in batches)


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {}])
def test_one_worker_unshuffled_equals_torch(options: dict[str, Any]) -> None:
    data = TensorDataset(torch.arange(10), torch.rand(10, 3))
    ours, theirs = loader_of(data, shuffle=False, **options), DataLoader(data, **options)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


class Doubled(TensorDataset):
    """Samples are not the rows of its tensors."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Halved(torch.Tensor):
    """Its rows are not those that it holds."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(index).as_subclass(torch.Tensor) / 2


class Together(Dataset[int]):
    """Gives all samples of a batch at once."""

    def __len__(self) -> int:
        return 7

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [100 + index for index in indices]

    def __getitem__(self, index: int) -> int:
        raise AssertionError("asked for one sample")


TENSORS = (
    torch.arange(7),
    torch.rand(7, 2, 3).half(),
    torch.rand(3, 7).mT,
    torch.rand(7, 2, 3, 3).to(memory_format=torch.channels_last),
    torch.rand(7, 2, dtype=torch.complex64).conj(),
    torch.rand(7, 0) > 0.5,
)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensors": (TensorDataset(*TENSORS), {}),
    "collated by hand": (TensorDataset(*TENSORS), {"collate_fn": tuple}),
    "samples made from tensors": (Doubled(*TENSORS[:2]), {}),
    "tensors of another class": (TensorDataset(torch.rand(7, 2).as_subclass(Halved)), {}),
    "named by slices": (TensorDataset(torch.rand(7, 2)), {"sampler": [slice(0, 2), slice(2, 4)]}),
    "all at once": (Together(), {}),
    "a dict": ([{"x": torch.rand(2), "y": index} for index in range(7)], {}),
}


def parts_of_batch(batch: Any) -> Iterator[Any]:
    """Whatever it is made of."""
    if isinstance(batch, (list, tuple, dict)):
        yield type(batch)
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from parts_of_batch(part)
    else:
        yield batch


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_the_one_that_torch_makes(name: str) -> None:
    data, options = KINDS[name]
    shuffled = {} if "sampler" in options else {"shuffle": False}
    ours, theirs = (
        make(data, batch_size=2, **options, **more)
        for make, more in ((loader_of, shuffled), (DataLoader, {}))
    )
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(parts_of_batch(mine), parts_of_batch(other), strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
                assert torch.equal(a, b)
            else:
                assert a == b


class Drawn(Dataset[float]):
    """Samples are drawn from a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(torch.rand((), generator=self.generator))


def test_a_generator_of_the_users_is_drawn_from_as_torch_does() -> None:
    found = []
    for make in (loader_of, DataLoader):
        generator = torch.Generator().manual_seed(3)
        loader = make(Drawn(generator), batch_size=2, shuffle=False, generator=generator)
        found.append([torch.cat(list(loader)).tolist() for _ in range(2)])
    assert found[0] == found[1]


def test_what_torch_does_not_collate_is_the_same_error() -> None:
    data = TensorDataset(torch.eye(7).to_sparse())
    for batches in (loader_of(data, batch_size=2), DataLoader(data, batch_size=2)):
        with pytest.raises(RuntimeError, match="sparse"):
            next(iter(batches))


def test_each_epoch_is_shuffled_anew_and_the_same_in_every_run() -> None:
    runs = [[epoch_of(loader) for _ in range(3)] for loader in (loader_of(range(20)), loader_of(range(20)))]
    assert runs[0] == runs[1] and len({str(epoch) for epoch in runs[0]}) == 3
    assert epoch_of(loader_of(range(20), seed=1)) != runs[0][0]


# Torch's generator.


def trained(batches: Iterator[torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters())


@pytest.mark.parametrize("processes", [0, 1])
def test_one_worker_trains_as_plain_torch_does(processes: int) -> None:
    data = torch.rand(12, 4)

    def ours() -> Iterator[torch.Tensor]:
        loader = loader_of(list(data), batch_size=4, shuffle=False, num_workers=processes)
        yield from loader
        yield from loader

    plain = (data[start : start + 4] for _ in range(2) for start in (0, 4, 8))
    assert torch.equal(trained(ours()), trained(plain))


def augmented(**options: Any) -> list[list[float]]:
    loader = loader_of(Noise(), batch_size=4, **options)
    return [torch.cat(list(loader)).tolist() for _ in range(2)]


def test_randomness_of_its_processes_follows_seed_epoch_and_worker() -> None:
    torch.manual_seed(1)
    first = augmented(num_workers=1)
    torch.manual_seed(2)
    assert augmented(num_workers=1) == first
    assert first[0] != first[1]
    others = [augmented(num_workers=1, groups=2, workers=2, **at) for at in ({"group": 1}, {"rank": 1}, {})]
    assert len({epochs[0][0] for epochs in [*others, augmented(num_workers=1, seed=1)]}) == 4


# Epochs, breaks, states.


def oracle(epochs: int, **options: Any) -> list[list[list[int]]]:
    loader = loader_of(range(23), batch_size=4, groups=2, **options)
    return [epoch_of(loader) for _ in range(epochs)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_break_starts_the_next_epoch(options: dict[str, Any]) -> None:
    loader = loader_of(range(23), batch_size=4, groups=2, **options)
    for batch in loader:
        assert (loader.epoch, loader.position) == (0, 1)
        assert batch.tolist() == oracle(1)[0][0]
        break
    assert (loader.epoch, loader.position) == (1, 0)
    assert [epoch_of(loader), epoch_of(loader)] == oracle(3)[1:]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("stop", range(1, 7))
def test_a_resumed_loader_hands_out_exactly_the_rest(stop: int, processes: int) -> None:
    expected = [batch for epoch in oracle(3) for batch in epoch]
    loader, handed, state = loader_of(range(23), batch_size=4, groups=2), [], {}
    for batch in islice(loader.endless(), stop):
        handed.append(batch.tolist())
        state = loader.state_dict()
    resumed = loader_of(range(23), batch_size=4, groups=2, num_workers=processes)
    resumed.load_state_dict(state)
    rest, epochs = epoch_of(resumed), oracle(3)
    assert handed + rest == [b for epoch in epochs[: state["epoch"] + 1] for b in epoch]
    assert handed + rest + epoch_of(resumed) == expected[: len(handed + rest) + len(loader)]


def test_a_state_inside_a_for_loop_resumes_the_same_way() -> None:
    loader, states = loader_of(range(23), batch_size=4, groups=2), []
    for _ in range(2):
        for _batch in loader:
            states.append(loader.state_dict())
    assert states == [{"epoch": e, "position": p} for e in range(2) for p in (1, 2, 3)]
    loader.load_state_dict(states[1])
    assert [epoch_of(loader), epoch_of(loader)] == [oracle(1)[0][2:], oracle(2)[1]]
    loader.load_state_dict(states[2])  # at the very end of an epoch nothing of it is left
    assert [epoch_of(loader), epoch_of(loader)] == [[], oracle(2)[1]]
    loader.load_state_dict(loader.state_dict())
    assert epoch_of(loader) == oracle(3)[2]


def test_endless_goes_over_the_epochs_and_on_where_it_was_left() -> None:
    loader = loader_of(range(23), batch_size=4, groups=2)
    handed = [batch.tolist() for count in (2, 5) for batch in islice(loader.endless(), count)]
    assert handed == [batch for epoch in oracle(3) for batch in epoch][:7]
    assert loader.state_dict() == {"epoch": 2, "position": 1}
    assert epoch_of(loader) == oracle(3)[2][1:]


def test_endless_without_batches_is_an_error() -> None:
    loader = loader_of(range(1), groups=2, group=1)
    assert len(loader) == 0 and epoch_of(loader) == []
    with pytest.raises(UsageError, match=r"no batches for worker 1\.0: too few samples for 2 groups"):
        loader.endless()


def test_a_stop_ends_every_iteration_before_a_batch_is_handed_out() -> None:
    asked = iter([False, False, True, False, True, False])
    weights: list[int] = []
    loader = loader_of(range(8), weights.append, batch_size=2, stopped=lambda: next(asked), shuffle=False)
    assert epoch_of(loader) == [[0, 1], [2, 3]]
    assert loader.state_dict() == {"epoch": 1, "position": 0}
    assert [batch.tolist() for batch in loader.endless()] == [[0, 1]]
    assert loader.state_dict() == {"epoch": 1, "position": 1}
    assert weights == [2, 2, 2]
    assert next(loader.endless()).tolist() == [2, 3]  # what was fetched but not handed out comes again


def test_two_iterations_at_once_are_an_error() -> None:
    loader = loader_of(range(8))
    with pytest.raises(UsageError, match="another one began"):
        list(zip(loader, loader, strict=True))
    assert (loader.epoch, loader.position) == (2, 0)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict({"epoch": 5, "position": 3})
    with pytest.raises(UsageError, match="a state was loaded"):
        next(iterator)
    assert loader.state_dict() == {"epoch": 5, "position": 3}


def test_an_error_of_the_dataset_comes_through() -> None:
    loader = loader_of({0: 1.0, 2: 3.0}, shuffle=False)
    with pytest.raises(KeyError):
        list(loader)


# Processes.


def test_processes_are_gone_when_the_iteration_is_over() -> None:
    loader = loader_of(range(20), num_workers=2)
    for leave in (True, False):
        for _batch in loader:
            assert len(active_children()) == 2
            if leave:
                break
        assert active_children() == []
    for _batch in islice(loader.endless(), 3):
        assert len(active_children()) == 2
    assert active_children() == []


def test_persistent_processes_persist() -> None:
    loader = loader_of(range(8), num_workers=1, persistent_workers=True)
    seen = []
    for _ in range(2):
        next(iter(loader))
        seen.append([child.pid for child in active_children()])
    assert seen[0] == seen[1] and len(seen[0]) == 1
    del loader
    assert active_children() == []


ORPHANS = """
from multiprocessing import active_children
from shoal.data import Place, make_loader
loader = make_loader(range(1000), Place(), on_batch=lambda weight: None, num_workers=2)
iterator = iter(loader)
next(iterator)
print(*[child.pid for child in active_children()], flush=True)
input()
"""


def test_processes_end_at_once_when_their_parent_is_killed() -> None:
    command = [sys.executable, "-c", ORPHANS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert len(parent.stdout.readline().split()) == 2
        parent.kill()
        assert select([parent.stdout], [], [], 2.0)[0]  # its end, once nobody holds the other side
        assert parent.stdout.read() == ""


# What is taken over, and what is refused.


def named(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.prefix = f"process {worker}"  # type: ignore[attr-defined]


class Named(Dataset[str]):
    prefix = "none"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> str:
        return f"{self.prefix}: {index}"


def test_a_dataloader_is_taken_over() -> None:
    source = DataLoader(
        Named(), batch_size=2, drop_last=True, num_workers=1, collate_fn=tuple, worker_init_fn=named,
        prefetch_factor=3, timeout=9, generator=torch.Generator(),
    )  # fmt: skip
    loader = loader_of(source)
    assert list(loader) == [("process 0: 0", "process 0: 1"), ("process 0: 2", "process 0: 3")]
    assert loader.dataset is source.dataset and loader.batch_size == 2
    for name in ("num_workers", "prefetch_factor", "timeout", "generator", "collate_fn"):
        assert getattr(loader._source._loading._loader, name) == getattr(source, name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("shuffle", "sequential"), [(True, False), (False, True), (None, True)])
def test_a_dataloaders_wish_to_shuffle_is_taken_over(shuffle: bool | None, sequential: bool) -> None:
    loader = loader_of(DataLoader(range(20), shuffle=shuffle))  # type: ignore[arg-type]
    assert ([sample for batch in epoch_of(loader) for sample in batch] == list(range(20))) is sequential


DATA = TensorDataset(torch.arange(6))
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (iter([1, 2]), {}, "list_iterator can be read once only"),
    (Sized(), {}, "Sized cannot be dealt"),
    (DATA, {"bach_size": 3}, "no keyword 'bach_size'\n.*batch_size"),
    (DATA, {"shared": True}, "no keyword 'shared'\n.*sharded"),
    (DATA, {"dataset": DATA}, "no keyword 'dataset'"),
    (DATA, {"sharded": True}, "sharded=True for a TensorDataset"),
    (DATA, {"batch_size": 0}, "batch_size=0"),
    (DATA, {"batch_size": None}, "batch_size=None"),
    (DATA, {"batch_size": True}, "batch_size=True"),
    (DATA, {"batch_size": {0: 2, 1: 0}, "workers": 2}, "batch_size=0"),
    (DATA, {"batch_size": {1: 2}, "workers": 3}, "for a group of 3, lacks 0, 2\n.*0 to 2"),
    (DATA, {"batch_size": {0: 2, 1: 2, "x": 3}}, "for a group of 1, also has 1, 'x'"),
    (DATA, {"in_order": False}, "in_order=False"),
    (DataLoader(DATA), {"batch_size": 2, "shuffle": True}, "a DataLoader and keywords: batch_size, shuffle"),
    (DataLoader(DATA, batch_size=None), {}, "batch_size=None"),
]


@pytest.mark.parametrize(("data", "keywords", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_dealt_is_refused_with_a_remedy(
    data: Any, keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        loader_of(data, **keywords)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0},
        {"epoch": -1, "position": 0},
        {"epoch": 0, "position": 9},
        {"epoch": 0, "position": -1},
        {"epoch": 1.5, "position": 0},
        {"epoch": True, "position": 0},
    ],
)
def test_states_of_something_else_are_refused(state: dict[str, Any]) -> None:
    loader = loader_of(range(8))
    with pytest.raises(UsageError, match="8 batches cannot stand at"):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"epoch": 0, "position": 0}


def test_endless_left_at_an_epochs_end_leaves_the_next_epoch_whole() -> None:
    loader = make_loader(list(range(6)), Place(0, 1, 1, 0, 0), on_batch=lambda weight: None, batch_size=2)
    for _, _batch in zip(range(3), loader.endless(), strict=False):
        pass
    assert sorted(int(i) for batch in loader for i in batch) == list(range(6))
