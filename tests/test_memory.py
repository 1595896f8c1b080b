"""Memory that members of one machine share."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from wires import no_files_left

from shoal.errors import LaunchError, ProtocolError
from shoal.parameters import as_bytes
from shoal.run import Run
from shoal.testing import run_cluster
from shoal.transport.memory import Memory

NEAR = Memory(lambda peer: peer == "near")


def test_what_lies_in_it_has_a_place_for_near_peers_only() -> None:
    memory = Memory(lambda peer: peer == "near")
    room = memory.allocate(1000)
    frame = as_bytes(room[100:200])
    assert memory.place("near", frame)
    assert memory.place("far", frame) == ""
    assert memory.place("near", as_bytes(torch.zeros(10))) == ""
    assert memory.place("near", bytes(10)) == ""
    assert memory.place("near", as_bytes(room[:0])) == ""


def test_places_are_found_again_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.transport.memory.KNOWN", 3)
    memory, reader = Memory(lambda peer: True), Memory()
    room = memory.allocate(100).copy_(torch.arange(100))
    frames = [as_bytes(room[number : number + 2]) for number in range(10)]
    for _ in range(2):
        for number, frame in enumerate(frames):
            assert bytes(reader.at(memory.place("near", frame))) == bytes((number, number + 1))
    for number in range(10):  # another frame, perhaps where one was that is gone
        assert bytes(reader.at(memory.place("near", as_bytes(room[number : number + 1])))) == bytes((number,))


def test_another_process_reads_and_writes_it_in_place() -> None:
    memory = Memory(lambda peer: True)
    room = memory.allocate(4096)
    room[10] = 7
    place = memory.place("near", as_bytes(room[10:12]))
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(place,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert room[11] == 8


def _answer(place: str) -> None:
    seen = memoryview(Memory().at(place))
    if seen[0] == 7 and len(seen) == 2:
        seen[1] = 8


def test_a_file_that_has_taken_the_number_of_another_is_not_mistaken_for_it() -> None:
    reader, first = Memory(), Memory(lambda peer: True)
    room = first.allocate(64)
    place = first.place("near", as_bytes(room))
    assert bytes(reader.at(place)) == bytes(64)
    first.close()
    second = Memory(lambda peer: True)
    again = second.allocate(64)
    again.fill_(5)
    assert bytes(reader.at(second.place("near", as_bytes(again)))) == b"\x05" * 64
    with pytest.raises(ProtocolError, match="cannot be read"):
        Memory().at(place)


def test_nothing_but_shared_memory_is_opened() -> None:
    memory = Memory(lambda peer: True)
    name, _, _ = memory.place("near", as_bytes(memory.allocate(64))).rpartition(":0:")
    for place in ("", "../../etc/passwd", f"{name}:0:65", f"{name}:64:1", f"{name}:-1:4", "1:1:1:1"):
        with pytest.raises(ProtocolError):
            memory.at(place)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(100))
        file.flush()
        inode = os.fstat(file.fileno()).st_ino
        with pytest.raises(ProtocolError, match="not the memory that was meant"):
            memory.at(f"{os.getpid()}:{os.open('/etc/hostname', os.O_RDONLY)}:{inode}:0:1")


def test_held_gradients_lie_in_their_slots_and_stay_the_scripts() -> None:
    """Edited in place they train what plain PyTorch trains with the same edits."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
        optimizer.zero_grad()
        model(torch.ones(4, 300)).square().mean().backward()
        places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        optimizer.step()
        return places

    start = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = deepcopy(start)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def work(run: Run) -> tuple[torch.Tensor, list[list[int]]]:
        model, optimizer = make()
        run.prepare(model, optimizer)
        run.hold()
        places = [train(model, optimizer) for _ in run.epochs(3)]
        return model.state_dict()["0.weight"].clone(), places

    model, optimizer = make()
    for _ in range(3):
        train(model, optimizer)
    wanted = model.state_dict()["0.weight"]
    for workers, servers in ((1, 1), (2, 1), (1, 3)):
        block = {
            "server_worker_separate": True,
            "nworkers_per_group": workers,
            "nservers_per_group": servers,
            "chunk_bytes": 65536,
        }
        for found, places in run_cluster(work, block).results.values():
            assert torch.equal(found, wanted)
            whole = slice(None if servers == 1 else 1)  # the end of a model may be dealt out in bits
            assert places[0][whole] == places[1][whole] == places[2][whole]


@pytest.mark.parametrize("cluster", ["sandblaster", "allreduce", "downpour", "hogwild"])
def test_gradients_and_values_are_read_where_they_lie(cluster: str) -> None:
    inline: list[str] = []

    def train(run: Run) -> None:
        torch.manual_seed(0)
        model = nn.Linear(300, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.prepare(model, optimizer)
        for _ in run.epochs(3):
            model(torch.ones(4, 300)).sum().backward()
            optimizer.step()

    def judge(header: object, peer: str) -> str:
        kind, place, chunk = (getattr(header, name) for name in ("kind", "place", "chunk"))
        if kind.name in ("SHARE", "VALUES") and not place and chunk >= 0:
            inline.append(kind.name)
        return "deliver"

    report = run_cluster(train, cluster, judge=judge)  # type: ignore[arg-type]
    assert "SHARE" not in inline
    assert report.total("applied") > 0


def test_a_file_with_a_name_is_not_opened_even_if_the_message_knows_its_number() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"a secret")
        file.flush()
        inode = os.fstat(file.fileno()).st_ino
        with pytest.raises(ProtocolError, match="not the memory that was meant"):
            Memory().at(f"{os.getpid()}:{file.fileno()}:{inode}:0:8")


def test_reading_a_peers_memory_keeps_no_file_open() -> None:
    owner, reader = Memory(lambda peer: True), Memory()
    places = [owner.place("near", as_bytes(owner.allocate(64))) for _ in range(5)]
    before = len(os.listdir("/proc/self/fd"))
    for place in [*places, *places]:
        reader.at(place)
    assert len(os.listdir("/proc/self/fd")) == before
    reader.close()
    owner.close()
    assert len(os.listdir("/proc/self/fd")) == before - 5


def test_a_start_without_state_is_read_where_it_lies() -> None:
    inits: list[str] = []

    def train(run: Run) -> None:
        model = nn.Linear(300, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.prepare(model, optimizer)

    def judge(header: Any, peer: str) -> str:
        if header.kind.name == "INIT":
            inits.append(header.place)
        return "deliver"

    run_cluster(train, "sandblaster", judge=judge)  # type: ignore[arg-type]
    assert inits and all(inits)


def test_who_may_open_no_more_files_is_told_that() -> None:
    owner, reader = Memory(lambda peer: True), Memory()
    place = owner.place("near", as_bytes(owner.allocate(64)))
    with no_files_left(), pytest.raises(LaunchError, match="ulimit -n"):
        reader.at(place)
    owner.close()


def test_a_place_is_in_the_memory_that_lies_there_now() -> None:
    owner = Memory(lambda peer: True)
    region = owner.allocate(64)
    (now,) = owner._own
    owner._own.insert(0, now._replace(name="gone"))
    assert owner.place("near", as_bytes(region)).startswith(now.name)
    owner._own.pop(0)
    owner.close()
