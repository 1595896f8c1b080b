"""What copies to and from a GPU wait for, with a device whose copies end when the test says so."""

from __future__ import annotations

import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import ALLREDUCE, SANDBLASTER, Case, adamw, adds_up, check, close, fit, large, plain, same
from frameworks import ASYNCHRONOUS, check_asynchronous, clustered
from test_shares import LOOPS, Loop
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode
from toys import config

from shoal.collectives import Collectives
from shoal.exchange import Exchange
from shoal.parameters import as_bytes
from shoal.site import Membership
from shoal.staging import Stage
from shoal.topology import Member, Topology
from shoal.transport.memory import Memory

CPU = torch.device("cpu")
GARBAGE = 77  # what half a copy has written


class Device:
    """Stands for torch.cuda, with the CPU as the GPU: a copy happens when somebody learns of it.

    Until then its target holds garbage. Values for the model are there at once for the model, as streams that
    wait for each other see to; but who overwrites where they came from before the event is done is told.

    Args:
        done: what the next query of an event answers.
    """

    def __init__(self, done: Callable[[], bool] = lambda: False, pins: bool = True) -> None:
        self.done, self.pins = done, pins
        self.pinned: list[tuple[int, int]] = []
        self.sides: list[Side] = []

    def Stream(self, device: torch.device) -> Side:
        self.sides.append(Side())
        return self.sides[-1]

    def Event(self, blocking: bool) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Current:
        return Current()

    def stream(self, side: Side) -> AbstractContextManager[Any]:
        return Later(side)

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.pins:
            self.pinned.append((address, nbytes))
        return 0 if self.pins else 712

    def _unregister(self, address: int) -> None:
        self.pinned = [region for region in self.pinned if region[0] != address]


class Side:
    """A stream: what it has been given to copy since the last event."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.sources: list[weakref.ref[Tensor]] = []
        self.waits = False

    def wait_stream(self, current: Current) -> None:
        self.waits = True

    def record_event(self, event: Event) -> Event:
        event.work, self.work, self.sources, self.waits = self.work, [], [], False
        return event

    def given(self, target: Tensor, source: Tensor) -> None:
        assert self.waits, "the computing may not have got that far"
        target.fill_(GARBAGE)
        self.sources.append(weakref.ref(source))
        self.work.append(partial(_copied, target, self.sources[-1]))


class Current:
    """The stream that computes."""

    def wait_stream(self, side: Side) -> None:
        for copy in side.work:
            copy()
        side.work = [partial(_unchanged, source, _alive(source).clone()) for source in side.sources]


def _alive(source: weakref.ref[Tensor]) -> Tensor:
    found = source()
    assert found is not None, "memory was given back before its copy was done"
    return found


@torch.no_grad()
def _copied(target: Tensor, source: weakref.ref[Tensor]) -> None:
    target.copy_(_alive(source))


def _unchanged(source: weakref.ref[Tensor], before: Tensor) -> None:
    assert torch.equal(_alive(source), before), "memory was written to before its copy was done"


class Event:
    """A place in a stream."""

    def __init__(self, device: Device) -> None:
        self.work: list[Callable[[], None]] = []
        self._device = device

    def query(self) -> bool:
        if self._device.done():
            self.synchronize()
        return not self.work

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


class Later(TorchFunctionMode):
    """Inside it, copies that do not block are left to a stream."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._side = side

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            with torch.no_grad():
                self._side.given(*args)
            return args[0]
        return function(*args, **(kwargs or {}))


def staged(device: Device) -> Stage:
    return Stage([CPU], lambda message: None, device)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], bool]], list[Device]]]:
    """Gives every worker a stage whose copies are done when asked for, or not."""

    def use(done: Callable[[], bool]) -> list[Device]:
        devices: list[Device] = []

        def of(cls: type[Stage], tensors: Any, note: Callable[[str], None]) -> Stage:
            devices.append(Device(done))
            return cls([CPU], note, devices[-1])

        monkeypatch.setattr(Stage, "of", classmethod(of))
        return devices

    yield use


# A whole step: nothing reads a slot, or gives memory back, too early.


def often() -> Callable[[], bool]:
    """Half of the looks find a copy done, at places that are the same each time."""
    rng = random.Random(5)
    return lambda: rng.random() < 0.5


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_loops_equal_plain_pytorch_whenever_copies_end(
    stages: Any, loop: Loop, cluster: Mapping[str, Any]
) -> None:
    devices = stages(often())
    check(Case(large, adamw, loop), cluster)
    assert len(devices) == 3 and all(device.sides for device in devices)


@pytest.mark.parametrize(("loop", "overlap"), [(fit, False), (fit, True), (LOOPS["accumulating"], False)])
def test_copies_that_are_never_seen_done_are_waited_for_at_the_step(
    stages: Any, loop: Loop, overlap: bool
) -> None:
    case = Case(large, adamw, loop)
    stages(lambda: False)
    late = clustered(case, SANDBLASTER, overlap=overlap)
    stages(lambda: True)
    early = clustered(case, SANDBLASTER, overlap=overlap)
    for report in (late, early):
        adds_up(report)
        for values in report.results.values():
            close(values, plain(case))
    same(late.results["worker 0.0"], early.results["worker 0.0"])


def test_clipping_and_buffers_wait_for_their_copies(stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(run: Any, model: nn.Module, optimizer: Any, batches: Any) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            run.clip_grad_norm_(0.1)
            optimizer.step()

    case = Case(lambda: nn.Sequential(large(), nn.BatchNorm1d(4)), adamw)
    expected = clustered(case, SANDBLASTER, body=body).results
    stages(often())
    for name, values in clustered(case, SANDBLASTER, body=body).results.items():
        same(values, expected[name])


def test_a_gradient_that_is_dropped_before_its_copy_is_done_counts_as_zero(stages: Any) -> None:
    def body(run: Any, model: nn.Module, optimizer: Any, batches: Any) -> None:
        for inputs, _ in batches:
            optimizer.zero_grad()
            nn.functional.linear(inputs, model.weight).sum().backward()  # type: ignore[arg-type]
            model.weight.grad = None
            model.bias.grad = torch.ones(4, dtype=torch.float64)
            optimizer.step()

    case = Case(lambda: nn.Linear(8, 4), adamw)
    expected = clustered(case, SANDBLASTER, body=body).results
    stages(lambda: False)
    for name, values in clustered(case, SANDBLASTER, body=body).results.items():
        same(values, expected[name])


@pytest.mark.parametrize("framework", ["downpour", "hogwild"])
def test_asynchronous_groups_train_whenever_copies_end(stages: Any, framework: str) -> None:
    stages(often())
    gentle = Case(large, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), steps=20)
    check_asynchronous(gentle, ASYNCHRONOUS[framework], bound=0.95)


def test_chunks_leave_during_backward_if_their_copies_are_done(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("share", "commit"):
        monkeypatch.setattr(Exchange, name, _telling(getattr(Exchange, name), name, told))

    def body(run: Any, model: nn.Module, optimizer: Any, batches: Any) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            told.append("step")
            optimizer.step()

    one = {"nservers_per_group": 2, "server_worker_separate": True}
    for done, first in ((True, "share"), (False, "step")):
        told.clear()
        stages(lambda done=done: done)
        clustered(Case(large, adamw), one, body=body)
        assert told[0] == first and told[told.index("step") + 1 :].index("commit") >= (not done)


def _telling(method: Callable[..., Any], name: str, told: list[str]) -> Callable[..., Any]:
    def tell(*args: Any, **keywords: Any) -> Any:
        told.append(name)
        return method(*args, **keywords)

    return tell


# The stage by itself.


def test_a_chunk_is_sent_when_its_copies_are_done_and_all_before_it() -> None:
    done = [False]
    stage, sent = staged(Device(lambda: done[0])), list[int]()
    slots = torch.zeros(2, 4)
    hook = stage.between(lambda tensor: sent.append(-1))
    for chunk in (0, 1):
        stage.down(chunk, slots[chunk], torch.full((4,), chunk + 1.0))
        stage.once_copied(chunk, lambda chunk=chunk: sent.append(chunk))  # type: ignore[misc]
    stage.once_copied(2, lambda: sent.append(2))  # nothing is copied, and it waits for its turn
    hook(slots)
    assert sent == [-1] and (slots == GARBAGE).all()
    done[0] = True
    hook(slots)
    assert sent == [-1, 0, 1, 2, -1] and slots.tolist() == [[1.0] * 4, [2.0] * 4]


def test_a_step_waits_for_what_is_not_copied() -> None:
    stage, sent, slot = staged(Device()), list[Tensor](), torch.zeros(3)
    stage.down(0, slot[:2], torch.ones(2))
    stage.down(0, slot[2:], torch.ones(1))
    stage.once_copied(0, lambda: sent.append(slot.clone()))
    assert not sent and not stage.copied(0)
    stage.look(wait=True)
    assert sent[0].tolist() == [1, 1, 1] and stage.copied(0)


def test_a_gradient_is_kept_until_it_is_copied() -> None:
    device = Device()
    stage, slot, gradient = staged(device), torch.zeros(2), torch.ones(2)
    kept = weakref.ref(gradient)
    stage.down(0, slot, gradient)
    del gradient
    assert kept() is not None
    stage.copied(0, wait=True)
    assert kept() is None


def test_values_are_there_at_once_and_their_memory_is_free_after_settling() -> None:
    stage, model, room = staged(Device()), torch.zeros(2), torch.ones(2)
    stage.up(model, room)
    assert model.tolist() == [1, 1]
    stage.settle()
    room.fill_(5)
    stage.settle()
    stage.up(model, room)
    room.fill_(6)
    with pytest.raises(AssertionError, match="before its copy was done"):
        stage.settle()


def test_what_is_on_no_gpu_is_copied_at_once() -> None:
    stage = Stage([torch.device("meta")], lambda message: None, Device())
    slot, model = torch.zeros(2), torch.zeros(2)
    stage.down(0, slot, torch.ones(2))
    stage.up(model, slot)
    assert stage.copied(0) and slot.tolist() == model.tolist() == [1, 1]
    assert Stage.of([slot, model], lambda message: None) is None


def test_shared_memory_is_page_locked_a_peers_as_well_until_the_end() -> None:
    device, memory = Device(), Memory(lambda peer: True)
    stage = staged(device)
    memory.mapped = stage.pin
    room = memory.allocate(4096)
    peers = Memory(lambda peer: True)
    memory.at(peers.place("near", as_bytes(peers.allocate(8192)[:10])))
    assert device.pinned[0] == (room.data_ptr(), 4096) and device.pinned[1][1] == 8192
    stage.close()
    assert device.pinned == []


def test_memory_that_cannot_be_page_locked_is_said_and_used_all_the_same() -> None:
    said: list[str] = []
    stage = Stage([CPU], said.append, Device(pins=False))
    stage.pin(torch.zeros(8, dtype=torch.uint8))
    assert len(said) == 1 and "page-locked" in said[0]
    stage.close()


# Around it.

FORKED = """
import importlib, torch
def started(*args, **keywords): raise SystemExit("CUDA was asked for before the fork")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = started
from shoal.launcher.forkserver import IMPORTS
for name in IMPORTS:
    importlib.import_module(name)
"""


def test_nothing_asks_for_cuda_before_members_are_forked() -> None:
    result = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b"], "cpu:gloo,cuda:nccl"),
        (["a", "a"], "gloo"),  # two workers on one GPU, which NCCL refuses
        (["a", "none"], "gloo"),
        (["none", "a"], "gloo"),
    ],
)
def test_nccl_is_chosen_where_each_worker_has_a_gpu(
    gpus: list[str], backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine, theirs = gpus
    monkeypatch.setattr(torch.cuda, "is_available", lambda: mine != "none")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=mine))
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    settings = config(nworkers_per_group=2)
    topology = Topology.of(settings.cluster)
    member = Member("worker", 0, 0)
    membership = Membership(settings, topology, member, "run", None, tmp_path, local_rank=4)
    store = distributed.HashStore()
    store.set("gpu/1", theirs)
    site: Any = SimpleNamespace(check=lambda waited=0.0: None)
    given = Collectives(membership, site)._backend(store)
    assert given.pop("backend") == backend
    assert given == ({} if backend == "gloo" else {"device_id": torch.device("cuda", 1)})
