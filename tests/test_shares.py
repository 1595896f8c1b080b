"""When shares leave, which of them count, what untouched means, and which edits are errors."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import (
    ALLREDUCE,
    ALONE,
    GROUPS,
    SANDBLASTER,
    TOPOLOGIES,
    WIDTH,
    Batch,
    Case,
    Loop,
    Values,
    adamw,
    adds_up,
    averaged,
    check,
    close,
    clustered,
    counted,
    dropped,
    fit,
    large,
    loss_of,
    mlp,
    part,
    plain,
    regression,
    same,
    sgd,
    values_of,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import Run
from shoal.errors import GradientEdited, ParameterEdited
from shoal.testing import run_cluster
from shoal.transport.faulty import Fate
from shoal.wire import Header, Kind

# Loops that are not the tutorial's.


def accumulating(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Two backwards for each step."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        for half in range(2):
            (loss_of(model, inputs[:, :WIDTH], targets) / 2 * (1 + half)).backward()
        optimizer.step()


def skipping(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The second batch is thrown away after its backward."""
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        if number == 1:
            continue
        optimizer.step()


def forgetting(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The first layer's gradients are dropped before two of the steps, all of them before a third."""
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        for index, parameter in enumerate(model.parameters()):
            if (number in (1, 2) and index < 2) or number == 3:
                parameter.grad = None
        optimizer.step()


def zeroing(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """zero_grad leaves zeros, which are gradients: momentum and decay go on."""
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def zeroing_after_a_skip(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """What is pushed is zeroed in place, and the next backward reaches only a part of the model."""
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad(set_to_none=False)
        if number == 2:
            (model[-1](torch.ones(1, model[-1].in_features, dtype=targets.dtype))).sum().backward()
        else:
            loss_of(model, inputs, targets).backward()
        if number != 1:
            optimizer.step()


def piling(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Gradients are never zeroed."""
    for inputs, targets in batches:
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def stepping_twice(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """A second step with the same gradients, and one without any."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        optimizer.step()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.step()


def with_closure(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """step(closure) evaluates once."""
    for inputs, targets in batches:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None


def unfreezing(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """The first layer is frozen until the third step, the last one from then on."""
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for number, (inputs, targets) in enumerate(batches):
        layers[0].requires_grad_(number >= 2)
        layers[-1].requires_grad_(number < 2)
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


LOOPS: dict[str, Loop] = {
    "accumulating": accumulating,
    "skipping": skipping,
    "forgetting": forgetting,
    "zeroing": zeroing,
    "zeroing after a skip": zeroing_after_a_skip,
    "piling": piling,
    "stepping twice": stepping_twice,
    "with a closure": with_closure,
    "unfreezing": unfreezing,
}


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_unusual_loops_equal_plain_pytorch(loop: Loop, cluster: Mapping[str, Any]) -> None:
    check(Case(large, adamw, loop), cluster)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_unusual_loops_with_momentum_and_decay(loop: Loop) -> None:
    gentle = Case(
        mlp, lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1), loop
    )
    check(gentle, SANDBLASTER)


# Untouched (rule 3.5).


class Experts(nn.Module):
    """Each sample goes to one expert by its first feature; the last expert and `idle` get none."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 16)
        self.idle = nn.Parameter(torch.ones(70))
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.shared(inputs).tanh()
        outputs = torch.zeros(len(inputs), 4, dtype=inputs.dtype)
        chosen = torch.bucketize(inputs[:, 0].contiguous(), torch.tensor([-0.8, 0.8], dtype=inputs.dtype))
        for number, expert in enumerate(self.experts):
            if (mine := chosen == number).any():
                outputs[mine] = expert(hidden[mine])
        return outputs


def test_the_experts_are_used_by_all_by_some_and_by_none() -> None:
    """The cases below would prove nothing otherwise."""
    used: set[int] = set()
    for inputs, _ in regression():
        cuts = torch.tensor([-0.8, 0.8], dtype=inputs.dtype)
        parts = [set(torch.bucketize(p[:, 0].contiguous(), cuts).tolist()) for p in inputs.tensor_split(3)]
        used |= {sum(number in seen for seen in parts) for number in range(4)}
    assert used == {0, 1, 2, 3}


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_untouched_by_all_or_by_some(
    optimizer: Callable[[nn.Module], Optimizer], cluster: Mapping[str, Any]
) -> None:
    check(Case(Experts, optimizer), cluster)


class Turns(nn.Module):
    """Two branches that are used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp() for _ in range(2))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.branches[self.calls // 2 % 2](inputs)


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_untouched_in_some_steps_neither_decays_nor_moves_nor_counts(cluster: Mapping[str, Any]) -> None:
    check(Case(Turns, adamw, steps=7), cluster)
    check(Case(Turns, sgd, steps=7), cluster)


class LargeExperts(Experts):
    """Each expert has chunks of its own, so workers that do not touch it push nothing for them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 2500), nn.Tanh(), nn.Linear(2500, 4)) for _ in range(4)
        )


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
def test_what_some_workers_do_not_touch_counts_as_zero_there(cluster: Mapping[str, Any]) -> None:
    case = Case(LargeExperts, adamw)
    trained = clustered(case, cluster)
    same(trained.values[0], averaged(case, 3))
    adds_up(trained.report)
    rounds = counted(trained.report, "rounds")
    assert rounds < counted(trained.report, "applied") < 3 * rounds  # not all of them pushed each chunk


def test_a_gradient_that_one_worker_drops_after_its_push_counts_as_zero() -> None:
    start, batches = Case(mlp).model(), regression(1)

    def work(run: Run) -> Values:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        loss_of(model, *part(batches, run.rank, run.world_size)[0]).backward()
        if run.rank == 1:
            model[0].bias.grad = None
        optimizer.step()
        return values_of(model)

    expected = values_of(start)
    for rank in range(3):
        model = deepcopy(start)
        loss_of(model, *part(batches, rank, 3)[0]).backward()
        for name, parameter in model.named_parameters():
            if (rank, name) != (1, "0.bias"):
                expected[name] -= parameter.grad / 3
    for values in run_cluster(work, SANDBLASTER).results.values():
        close(values, expected)


# The ledger of unusual loops.


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_superseded_shares_are_counted_exactly(cluster: Mapping[str, Any]) -> None:
    """The first of two backwards pushes each chunk early in the first step only; later it waits."""
    steps, chunks = 4, _chunks(cluster)
    workers = cluster.get("nworkers_per_group", 1)
    report = clustered(Case(large, adamw, accumulating, steps), cluster).report
    adds_up(report)
    assert dropped(report, "superseded") == chunks * workers
    assert counted(report, "applied") == chunks * workers * steps
    assert counted(report, "pushed") == chunks * workers * (steps + 1)
    assert counted(report, "rounds") == chunks * steps


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_skipped_batch_supersedes_its_shares(cluster: Mapping[str, Any]) -> None:
    steps, chunks = 4, _chunks(cluster)
    workers = cluster.get("nworkers_per_group", 1)
    report = clustered(Case(large, adamw, skipping, steps), cluster).report
    adds_up(report)
    assert dropped(report, "superseded") == chunks * workers
    assert counted(report, "applied") == chunks * workers * (steps - 1)


def test_a_share_whose_gradients_are_dropped_is_superseded() -> None:
    """All of the fourth step's shares left during backward, and none of them counts."""
    report = clustered(Case(mlp, sgd, forgetting, steps=4), SANDBLASTER).report
    adds_up(report)
    assert dropped(report, "superseded") >= 3 * _chunks(SANDBLASTER, mlp)


def test_ordinary_loops_drop_nothing() -> None:
    for cluster in TOPOLOGIES.values():
        report = clustered(Case(large, adamw, steps=3), cluster).report
        assert counted(report, "pushed") == counted(report, "applied") > 0


def _chunks(cluster: Mapping[str, Any], build: Callable[[], nn.Module] = large) -> int:
    """Chunks of a model under a cluster: one round each for one step."""
    return counted(clustered(Case(build, sgd, steps=1), cluster).report, "rounds")


# Shares leave while backward runs.


@pytest.mark.parametrize("cluster", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_the_first_share_leaves_before_backward_ends(cluster: Mapping[str, Any]) -> None:
    seen: dict[str, list[str]] = defaultdict(list)

    def judge(header: Header, peer: str) -> Fate:
        if header.kind in (Kind.SHARE, Kind.COMMIT):
            seen[header.sender].append(header.kind.name)
        return "deliver"

    start, batches = Case(large).model(), regression(4)

    def work(run: Run) -> None:
        name = f"worker 0.{run.rank}"
        model = deepcopy(start)
        model[0].weight.register_hook(lambda grad: seen[name].append("first layer"))
        model, optimizer = run.prepare(model, sgd(model))
        for inputs, targets in part(batches, run.rank, run.world_size):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            seen[name].append("backward is over")
            optimizer.step()
            seen[name].append("step is over")

    run_cluster(work, cluster, judge=judge)
    for events in seen.values():
        for step in range(4):
            events, rest = events[: events.index("step is over")], events[events.index("step is over") + 1 :]
            assert events.index("SHARE") < events.index("first layer"), step
            after = events[events.index("backward is over") :]
            assert "SHARE" not in after, step  # all have left: step() only commits
            assert "COMMIT" in after
            events = rest


def test_no_share_of_the_next_step_leaves_before_all_values_are_here() -> None:
    """The values of one chunk for one worker are lost once, in each step."""
    lock = threading.Lock()
    values: Counter[tuple[str, int]] = Counter()
    delivered: set[tuple[str, int, int]] = set()
    early: list[tuple[str, int]] = []
    lost: set[int] = set()
    chunks = _chunks(SANDBLASTER)

    def judge(header: Header, peer: str) -> Fate:
        with lock:
            if header.kind is Kind.VALUES and header.step:
                if peer == "worker 0.1" and header.step not in lost and header.chunk == chunks - 1:
                    lost.add(header.step)
                    return "lose"
                if (peer, header.step, header.chunk) not in delivered:
                    delivered.add((peer, header.step, header.chunk))
                    values[peer, header.step] += 1
            if (
                header.kind is Kind.SHARE
                and header.step > 1
                and values[header.sender, header.step - 1] < chunks
            ):
                early.append((header.sender, header.step))
        return "deliver"

    case = Case(large, adamw, steps=3)
    trained = clustered(case, SANDBLASTER, judge=judge)
    assert len(lost) == 3 and not early
    close(trained.values[1], plain(case))


def test_a_round_closes_chunk_by_chunk() -> None:
    """While one chunk lacks a share, the values of all others arrive."""
    lock, everything = threading.Lock(), threading.Event()
    answered: set[int] = set()
    chunks = _chunks(SANDBLASTER)
    lost: list[int] = []

    def judge(header: Header, peer: str) -> Fate:
        with lock:
            if header.kind is Kind.SHARE and header.chunk == 0 and header.sender == "worker 0.2" and not lost:
                lost.append(header.step)
                return "lose"
            if header.kind is Kind.SHARE and header.chunk == 0 and header.sender == "worker 0.2":
                if len(answered) < chunks - 1:
                    return "lose"
                everything.set()
            if header.kind is Kind.VALUES and header.step == 1 and peer == "worker 0.0":
                assert header.chunk != 0 or everything.is_set()
                answered.add(header.chunk)
        return "deliver"

    clustered(Case(large, sgd, steps=1), SANDBLASTER, judge=judge)
    assert everything.is_set() and len(answered) == chunks > 2


# Edits (rule 3.7).


def torch_clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def multiply(model: nn.Module) -> None:
    model[2].weight.grad.mul_(3)


def through_data(model: nn.Module) -> None:
    model[2].weight.grad.data.mul_(3)


def replace(model: nn.Module) -> None:
    model[2].weight.grad = model[2].weight.grad * 3


def add_late(model: nn.Module) -> None:
    model[2].weight.grad.add_(model[2].weight.detach(), alpha=0.1)


EDITS = {
    "torch's clip": torch_clip,
    "mul_": multiply,
    ".data": through_data,
    "another tensor": replace,
    "add_": add_late,
}


def editing(edit: Callable[[nn.Module], None], at: Sequence[int]) -> Loop:
    """A loop that edits gradients before some steps, counted from 1."""

    def loop(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for number, (inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            if number in at:
                edit(model)
            optimizer.step()

    return loop


@pytest.mark.parametrize("cluster", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_alone_an_edited_gradient_is_pushed_again(
    edit: Callable[[nn.Module], None], cluster: Mapping[str, Any]
) -> None:
    at = (2, 3) if edit is through_data else (2, 3, 5)
    report = check(Case(mlp, adamw, editing(edit, at), steps=6), cluster)
    assert dropped(report, "superseded") > 0


@pytest.mark.parametrize(
    "cluster", [SANDBLASTER, GROUPS["two workers beside three servers"]], ids=["3+2", "2+3"]
)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("step", [1, 3, 5])
def test_in_a_group_an_edited_gradient_is_an_error_that_names_it(
    edit: Callable[[nn.Module], None], cluster: Mapping[str, Any], step: int
) -> None:
    if edit is through_data and step > 3:
        pytest.skip("compared in the first three steps and in every hundredth")
    with pytest.raises(GradientEdited) as error:
        clustered(Case(mlp, adamw, editing(edit, (step,)), steps=6), cluster)
    assert "0.weight" in str(error.value) if edit is torch_clip else "2.weight" in str(error.value)
    assert error.value.step == step
    assert "run.clip_grad_norm_" in str(error.value.remedy)


def test_every_hundredth_step_compares_bytes() -> None:
    with pytest.raises(GradientEdited, match=r"step 100: the gradient of 2\.weight"):
        clustered(Case(mlp, adamw, editing(through_data, (100,)), steps=101), SANDBLASTER)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)


def clamp_data(model: nn.Module) -> None:
    model[2].weight.data.clamp_(-0.01, 0.01)


def replace_data(model: nn.Module) -> None:
    model[2].weight.data = model[2].weight.data * 2


@pytest.mark.parametrize("cluster", [ALONE["single"], SANDBLASTER], ids=["single", "sandblaster"])
@pytest.mark.parametrize(
    ("edit", "step"),
    [(clamp, 1), (clamp, 5), (clamp_data, 1), (clamp_data, 3), (replace_data, 2), (replace_data, 5)],
)
def test_an_edited_parameter_is_an_error_that_names_it(
    edit: Callable[[nn.Module], None], step: int, cluster: Mapping[str, Any]
) -> None:
    with pytest.raises(ParameterEdited, match=r"2\.weight") as error:
        clustered(Case(mlp, adamw, editing(edit, (step,)), steps=6), cluster)
    assert error.value.step == step and error.value.remedy


def test_parameters_may_be_changed_before_prepare() -> None:
    start = mlp().double()

    def work(run: Run) -> Values:
        model = deepcopy(start)
        clamp(model)
        model, optimizer = run.prepare(model, sgd(model))
        fit(model, optimizer, part(regression(), run.rank, run.world_size))
        return values_of(model)

    model = deepcopy(start)
    clamp(model)
    fit(model, sgd(model), regression())
    report = run_cluster(work, SANDBLASTER)
    adds_up(report)
    close(report.results["worker 0.2"], values_of(model))


def test_gradients_stay_the_workers_own() -> None:
    batches = regression(1)
    start = Case(mlp).model()

    def work(run: Run) -> list[Tensor]:
        model = deepcopy(start)
        model, optimizer = run.prepare(model, sgd(model))
        fit(model, optimizer, part(batches, run.rank, run.world_size))
        return [p.grad for p in model.parameters() if p.grad is not None]

    report = run_cluster(work, SANDBLASTER)
    for rank in range(3):
        model = deepcopy(start)
        loss_of(model, *part(batches, rank, 3)[0]).backward()
        for ours, parameter in zip(report.results[f"worker 0.{rank}"], model.parameters(), strict=True):
            assert torch.equal(ours, parameter.grad)
