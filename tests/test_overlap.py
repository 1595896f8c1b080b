"""prepare(overlap=True): values come during the next forward, nothing else changes, a missed wait is loud."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    SANDBLASTER,
    WIDTH,
    Batch,
    Case,
    adamw,
    adds_up,
    fit,
    looking,
    loss_of,
    mlp,
    part,
    regression,
    same,
    sgd,
    values_of,
)
from frameworks import ASYNCHRONOUS, SYNCHRONOUS, Body, clustered
from safetensors.torch import load_file
from test_any_script import JOINED, Expert, Tied
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from toys import Line, config, movement, pull_of

from shoal import Run
from shoal.config import Timeouts
from shoal.errors import MissedWait, NonFiniteGradients, ParameterEdited, WaitTimeout
from shoal.testing import run_cluster
from shoal.transport.faulty import Fate, Faulty
from shoal.wire import Header, Kind

SMALL = {"chunk_bytes": 1}  # 64 elements: each layer lies in chunks of its own, or nearly
GROUP = {"nworkers_per_group": 2, "nservers_per_group": 2, "server_worker_separate": True, **SMALL}

# Equal to a run without overlap.


class Borrowing(nn.Module):
    """The parent uses what one child holds; one runs in two of three steps, one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.first, self.lent, self.often = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.own, self.head = nn.BatchNorm1d(16), nn.Parameter(torch.ones(16)), nn.Linear(16, 4)
        self.idle = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        hidden = self.norm(self.first(inputs)).tanh() * self.own
        hidden = F.linear(hidden, self.lent.weight).tanh()
        return self.head(self.often(hidden) if self.steps % 3 else hidden)


class Checkpointed(nn.Module):
    """Its layers run a second time, in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False)
        return self.head(inputs)


class Transformer(nn.Module):
    """Attention, whose projection's hook never fires."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs[:, None])[:, 0])


def compiled_inside() -> nn.Module:
    """One layer compiled in place, one wrapped."""
    model = nn.Sequential(mlp(), nn.Tanh(), nn.Linear(4, 16), nn.Linear(16, 4))
    model[0].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")
    return model


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


def compiled_late(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """After prepare(), with the hooks in it."""
    fit(torch.compile(model, backend="eager"), optimizer, batches)


def following(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """An average of the script's own right after each step moves a buffer, which the model uses."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        with torch.no_grad():
            (_, average), *_ = model.named_buffers()
            average.lerp_(next(model.parameters()), 0.5)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("average", torch.zeros(4, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + F.linear(inputs, self.average)


def kept(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Gradients are never zeroed, also of what is not used."""
    for inputs, targets in batches:
        loss_of(model, inputs, targets).backward()
        optimizer.step()


TABLE: dict[str, Case] = {
    "mlp": Case(mlp),
    "mlp, Adam": Case(mlp, adamw),
    "tied": Case(Tied, adamw),
    "borrowed weights": Case(Borrowing, adamw, steps=8),
    "checkpointed": Case(Checkpointed, adamw),
    "transformer": Case(Transformer, adamw),
    "unused experts": Case(Expert, adamw),
    "gradients kept": Case(Borrowing, loop=kept, steps=7),
    "compiled parts": Case(compiled_inside),
    "compiled in place": Case(compiled_in_place),
    "compiled late": Case(mlp, loop=compiled_late),
    "looking": Case(Borrowing, loop=looking),
    "following": Case(Teacher, loop=following),
    **JOINED,
}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_every_bit_is_as_without_overlap(case: Case, cluster: Mapping[str, Any]) -> None:
    block = {**cluster, **SMALL}
    theirs = clustered(case, block, torch.float32).results
    for name, values in clustered(case, block, torch.float32, overlap=True).results.items():
        same(values, theirs[name])


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
@pytest.mark.parametrize("clip", [False, True])
def test_several_optimizers_are_open_at_once(clip: bool, cluster: Mapping[str, Any]) -> None:
    start = mlp()

    def train(run: Run, overlap: bool) -> dict[str, Tensor]:
        model, other = deepcopy(start), nn.Linear(4, 4, bias=False)
        nn.init.eye_(other.weight)
        free = nn.Parameter(torch.ones(4))  # no model holds it
        first = sgd(model[0])
        second = torch.optim.Adam([*model[2].parameters(), *other.parameters(), free], lr=0.01)
        run.prepare(model, other, first, second, overlap=overlap)
        for inputs, targets in part(regression(5, torch.float32), run.rank, run.world_size):
            (other(model(inputs)) * free - targets).square().mean().backward()
            for optimizer in (first, second):
                if clip:
                    run.clip_grad_norm_(0.1, optimizer=optimizer)
                optimizer.step()
                optimizer.zero_grad()
        run.wait()
        return {**values_of(model), "other": other.weight.detach().clone(), "free": free.detach().clone()}

    block = {**cluster, **SMALL}
    theirs = run_cluster(lambda run: train(run, False), block).results
    for name, values in run_cluster(lambda run: train(run, True), block, judge=clumsy()).results.items():
        same(values, theirs[name])


def test_what_comes_during_another_optimizers_wait_is_not_lost() -> None:
    """Nobody has to ask."""
    asked: list[Header] = []

    def judge(header: Header, peer: str) -> Fate:
        if header.kind is Kind.PULL and header.step:
            asked.append(header)
        return "deliver"

    def work(run: Run) -> None:
        model = mlp()
        first, second = sgd(model[0]), sgd(model[2])
        run.prepare(model, first, second, overlap=True)
        for inputs, targets in part(regression(5, torch.float32), run.rank, 2):
            loss_of(model, inputs, targets).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            run.mean(1.0)
            assert run.evaluate(lambda: 1) == 1  # takes all values anew, with other waits

    patient = Timeouts(start=20, values=20, flush=20, ask=3, evaluate=20, finish=20)
    run_cluster(work, config(patient, **GROUP), judge=judge)
    assert not asked


def clumsy() -> Callable[[Header, str], Fate]:
    """Loses each message of a step when it is first sent from or to a worker, now and then."""
    seen: set[tuple[Any, ...]] = set()

    def judge(header: Header, peer: str) -> Fate:
        if header.kind not in (Kind.SHARE, Kind.COMMIT, Kind.VALUES) or header.number < 0 or header.step != 2:
            return "deliver"
        key = header.kind, header.sender, peer, header.chunk, header.step, header.number
        if key in seen or header.chunk % 3 == 1:
            return "deliver"
        seen.add(key)
        return "lose"

    return judge


def test_gradient_scaling_waits_and_is_as_without_overlap() -> None:
    def train(run: Run, overlap: bool) -> tuple[list[float], dict[str, Tensor]]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model), overlap=overlap)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
        for number, (inputs, targets) in enumerate(part(regression(6, torch.float32), run.rank, 2)):
            optimizer.zero_grad()
            factor = float("inf") if (number, run.rank) == (3, 1) else 1.0
            scaler.scale(loss_of(model, inputs, targets) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values_of(model)

    start = mlp()
    theirs = run_cluster(lambda run: train(run, False), GROUP).results
    for name, (scales, values) in run_cluster(lambda run: train(run, True), GROUP).results.items():
        assert scales == theirs[name][0] == [8, 16, 16, 8, 8, 16]
        same(values, theirs[name][1])


# It does overlap.


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("build", "first"), [(mlp, "0"), (Transformer, "encoder.layers.0.linear1")])
def test_the_last_values_come_when_forward_has_begun(
    build: Callable[[], nn.Module], first: str, overlap: bool
) -> None:
    """The last layer's values are held back until the first layer's forward is over."""
    held: list[Faulty] = []
    last: set[int] = set()
    events: list[str] = []

    def judge(header: Header, peer: str) -> Fate:
        late = header.kind is Kind.VALUES and header.step == 2 and header.chunk in last
        return "hold" if late else "deliver"

    def work(run: Run) -> None:
        model = build()
        model, optimizer = run.prepare(model, sgd(model), overlap=overlap)
        replica, _ = run._training.joined()
        ends = {len(replica.tensors) - 1, len(replica.tensors) - 2}
        last.update(c.number for c in replica.plan.chunks if {p.parameter for p in c.pieces} <= ends)
        assert last

        def begun(*_: Any) -> None:
            events.append("forward")
            if events.count("step") == 2:
                held[0].open()

        model.get_submodule(first).register_forward_hook(begun)
        for inputs, targets in regression(4, torch.float32):
            model.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            events.append("step")
        run.wait()

    timeouts = Timeouts(start=20, values=20 if overlap else 1, flush=20, ask=0.1, evaluate=20, finish=20)
    block = config(timeouts, server_worker_separate=True, chunk_bytes=1)
    arguments = {"judge": judge, "links": lambda links: held.append(links["server 0.0"])}
    if overlap:
        run_cluster(work, block, **arguments)
        assert events == ["forward", "step"] * 4
    else:
        with pytest.raises(WaitTimeout, match=r"waited 1 s .* for new values"):
            run_cluster(work, block, **arguments)


def test_nothing_is_written_into_a_model_between_its_forward_and_its_backward() -> None:
    """Nor is this step's by step(); at the next wait all that was trained moves."""

    def work(run: Run) -> None:
        model = Borrowing()
        model, optimizer = run.prepare(model, adamw(model), overlap=True)
        tensors = run._training.joined()[0].tensors

        def versions() -> list[int]:
            return [tensor._version for tensor in tensors]

        for inputs, targets in regression(6, torch.float32):
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            before = versions()
            loss.backward()
            assert versions() == before
            optimizer.step()
        before = versions()
        run.wait()
        moved = [now > then for now, then in zip(versions(), before, strict=True)]
        assert all(new or tensor.grad is None for new, tensor in zip(moved, tensors, strict=True))

    run_cluster(work, GROUP)


# Every other look at the model waits.


def reduced(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def weight(model: nn.Module) -> Tensor:
    return model._modules["2"]._parameters["weight"]  # type: ignore[union-attr,return-value,index]


LOOKS: dict[str, Callable[[Run, nn.Module, Path], Tensor]] = {
    "wait": lambda run, model, path: (run.wait(), weight(model))[1],
    "state_dict": lambda run, model, path: model.state_dict()["2.weight"],
    "a part's state_dict": lambda run, model, path: model[2].state_dict()["weight"],
    "train": lambda run, model, path: weight(model.train()),
    "eval": lambda run, model, path: weight(model.eval()),
    "parameters": lambda run, model, path: list(model.parameters())[2],
    "named_parameters": lambda run, model, path: dict(model.named_parameters())["2.weight"],
    "deepcopy": lambda run, model, path: weight(deepcopy(model)),
    "torch.save": lambda run, model, path: weight(reduced(model)),
    "run.evaluate": lambda run, model, path: torch.tensor(run.evaluate(lambda: weight(model).tolist())),
    "run.edit": lambda run, model, path: next(weight(model) for _ in iter_with(run)),
    "forward": lambda run, model, path: (model(torch.ones(2, WIDTH)), weight(model))[1],
    "a part's forward": lambda run, model, path: (model[2](torch.ones(2, 16)), weight(model))[1],
    "the loop's end": lambda run, model, path: ([None for _ in run.epochs(0)], weight(model))[1],
    "next loop": lambda run, model, path: (next(iter(run.epochs(1))), weight(model))[1],
}


def iter_with(run: Run) -> Any:
    with run.edit():
        yield


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_who_looks_at_a_model_sees_its_new_values(look: Any, tmp_path: Path) -> None:
    start = mlp()

    def work(run: Run, overlap: bool) -> Tensor:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model), overlap=overlap)
        for batch in part(regression(3, torch.float32), run.rank, 2):
            fit(model, optimizer, [batch])
        before = weight(model).clone()
        found = look(run, model, tmp_path).detach().clone()
        assert not overlap or not torch.equal(found, before)
        return found

    theirs = run_cluster(lambda run: work(run, False), GROUP).results
    for name, found in run_cluster(lambda run: work(run, True), GROUP).results.items():
        assert torch.equal(found, theirs[name])


def test_files_hold_the_new_values(tmp_path: Path) -> None:
    start = mlp()

    def work(run: Run, overlap: bool) -> None:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model), overlap=overlap)
        fit(model, optimizer, part(regression(3, torch.float32), run.rank, 2))
        run.save(tmp_path / f"{overlap}.safetensors")

    for overlap in (False, True):
        run_cluster(lambda run, overlap=overlap: work(run, overlap), GROUP)
    same(load_file(tmp_path / "True.safetensors"), load_file(tmp_path / "False.safetensors"))


def test_a_copy_is_a_plain_model() -> None:
    def work(run: Run) -> None:
        model = compiled_inside()
        model, optimizer = run.prepare(model, sgd(model), overlap=True)
        fit(model, optimizer, regression(2, torch.float32))
        for copy in (deepcopy(model), reduced(mlp_of(run))):
            assert type(copy) is nn.Sequential
        fit(model, optimizer, regression(1, torch.float32))
        copy = deepcopy(model)
        inputs = torch.ones(2, WIDTH)
        assert torch.equal(copy(inputs), model(inputs))
        copy.train()

    def mlp_of(run: Run) -> nn.Module:
        return run._training.models[0][0]  # type: ignore[index,no-any-return]

    run_cluster(work, {**SMALL})


# A missed wait is loud.


def functional(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """No module's forward runs."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        hidden = F.linear(inputs, model[0].weight, model[0].bias).tanh()
        (F.linear(hidden, model[2].weight, model[2].bias) - targets).square().mean().backward()
        optimizer.step()


def by_hand(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """No hook fires either."""
    parameters = [model[0].weight, model[0].bias, model[2].weight, model[2].bias]
    for inputs, targets in batches:
        optimizer.zero_grad()
        hidden = F.linear(inputs, model[0].weight, model[0].bias).tanh()
        loss = (F.linear(hidden, model[2].weight, model[2].bias) - targets).square().mean()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("body", [functional, by_hand])
@pytest.mark.parametrize("cluster", [SYNCHRONOUS["single"], GROUP], ids=["single", "group"])
def test_a_gradient_from_old_values_is_an_error_that_names_it(body: Body, cluster: Mapping[str, Any]) -> None:
    message = r"(?s)worker 0\.\d, step 2: a gradient of [02]\.(weight|bias) .* run\.wait\(\)"
    with pytest.raises(MissedWait, match=message):
        clustered(Case(), cluster, torch.float32, body=body, overlap=True)

    def waiting(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for batch in batches:
            run.wait()
            body(run, model, optimizer, [batch])

    theirs = clustered(Case(), cluster, torch.float32).results
    for name, values in clustered(Case(), cluster, torch.float32, body=waiting, overlap=True).results.items():
        same(values, theirs[name])


def test_a_change_before_the_new_values_are_there_is_an_error() -> None:
    def clamping(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for batch in batches:
            fit(model, optimizer, [batch])
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)

    def moving(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for batch in batches:
            fit(model, optimizer, [batch])
            with torch.no_grad():
                model.average.add_(1)

    with pytest.raises(ParameterEdited, match=r"0\.weight"):
        clustered(Case(), GROUP, body=clamping, overlap=True)
    with pytest.raises(MissedWait, match=r"(?s)average .*run\.wait"):
        clustered(Case(Teacher), GROUP, body=moving, overlap=True)


def test_values_that_do_not_come_are_named_in_the_forward_that_wants_them() -> None:
    def judge(header: Header, peer: str) -> Fate:
        return "lose" if header.kind is Kind.VALUES and header.step == 2 else "deliver"

    def work(run: Run) -> None:
        model = mlp()
        model, optimizer = run.prepare(model, sgd(model), overlap=True)
        for _ in run.epochs(2):
            fit(model, optimizer, regression(1, torch.float32))
        raise AssertionError("the loop's end waits")

    quick = Timeouts(start=20, values=2, flush=1, ask=0.1, evaluate=1, finish=1)
    with pytest.raises(WaitTimeout, match=r"worker 0\.0, step 2: waited 2 s \(timeouts\.values\)"):
        run_cluster(work, config(quick), judge=judge)


def test_a_hundred_skipped_steps_are_an_error_with_overlap_too() -> None:
    def body(run: Run, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for _ in range(120):
            optimizer.zero_grad()
            (loss_of(model, *batches[0]) * float("nan")).backward()
            optimizer.step()

    with pytest.raises(NonFiniteGradients, match="step 100"):
        clustered(Case(), {}, body=body, overlap=True)


# Loops and groups.


@pytest.mark.parametrize("cluster", [GROUP, ASYNCHRONOUS["downpour"], ASYNCHRONOUS["hogwild"]])
def test_a_group_stops_at_one_step_whoever_waits_in_between(cluster: Mapping[str, Any]) -> None:
    data = TensorDataset(torch.ones(60, WIDTH), torch.ones(60, 4))

    def work(run: Run) -> int:
        model = mlp()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), overlap=True)
        loader = run.loader(data, batch_size=2)
        for batch in run.steps(loader, 10**9):
            fit(model, optimizer, [batch])
            if run.rank == run.world_size - 1 and run.global_step == 5:
                run.stop()
            if run.rank_in_group == 0:
                run.wait()
        taken = run._training.step_of()
        for _ in run.epochs(3):  # a stop is for one loop
            fit(model, optimizer, [next(iter(loader))])
        assert run._training.step_of() == taken + 3
        return taken

    report = run_cluster(work, cluster)
    last = f"worker {cluster.get('nworker_groups', 1) - 1}."
    assert {steps for name, steps in report.results.items() if name.startswith(last)} == {7}
    adds_up(report)


DELAYS = [
    ("downpour", None),
    ("downpour", 0),
    ("downpour", 1),
    ("hybrid", None),
    ("hybrid", 0),
    ("hogwild", None),
]


@pytest.mark.parametrize(("shape", "delay"), DELAYS)
def test_groups_beside_each_other_lose_nothing(shape: str, delay: int | None) -> None:
    block = {**ASYNCHRONOUS[shape], **({} if delay is None else {"max_delay": delay})}
    steps = {group: 6 - group for group in range(block["nworker_groups"])}

    def walk(run: Run) -> Tensor:
        model = Line()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), overlap=True)
        for step in run.epochs(steps[run.group]):
            optimizer.zero_grad()
            (model() * pull_of(run.rank, step + 1)).sum().backward()
            optimizer.step()
        run.evaluate(lambda: 0)
        return model().detach().clone()

    report = run_cluster(walk, config(**block))
    for end in report.results.values():
        assert torch.equal(end, movement(steps, block.get("nworkers_per_group", 1)))
    adds_up(report)
