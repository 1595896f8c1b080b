"""Models of every kind under every framework."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import WIDTH, Case, Drop, adamw, fit, mlp, plain, same, sgd, values_of
from frameworks import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    check_asynchronous,
    check_joined,
    check_parts,
    clustered,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from shoal import Run
from shoal.testing import run_cluster


def old_weight_norm() -> nn.Module:
    """The hook of old, which makes the weight anew before each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 16)), nn.Tanh(), nn.Linear(16, 4))


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 16)), nn.Tanh(), nn.Linear(16, 4))


def orthogonal() -> nn.Module:
    return nn.Sequential(
        parametrizations.orthogonal(nn.Linear(WIDTH, 16)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(16, 16), orthogonal_map="cayley"),
        nn.Linear(16, 4),
    )


def spectral_norm() -> nn.Module:
    """It moves buffers in each forward."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, 16)), nn.Tanh(), nn.Linear(16, 4))


class Complex(nn.Module):
    """complex128 where float64 is the default, else complex64; a real layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        kind = torch.complex128 if torch.get_default_dtype() is torch.float64 else torch.complex64
        self.inner, self.scale = (
            nn.Linear(WIDTH, 16, dtype=kind),
            nn.Parameter(torch.tensor(1 + 1j, dtype=kind)),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((self.inner(inputs.to(self.scale.dtype)) * self.scale).abs())


class Lazy(nn.Module):
    """Its first forward gives it shapes, before prepare()."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))
        self(torch.ones(1, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Reentrant(nn.Module):
    """A checkpointed part whose backward is a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, self.first(inputs), use_reentrant=True))


class Images(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 8, 2, groups=2),
            nn.Flatten(),
            nn.Linear(8, 4),
        ).to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs.view(-1, 2, 2, 2).to(memory_format=torch.channels_last))


class FineTuned(nn.Module):
    """Batch norm that stays in eval(): its statistics are used, and do not move."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.layers[1].running_mean.fill_(0.1)

    def train(self, mode: bool = True) -> nn.Module:
        """Never, for batch norm."""
        super().train(mode)
        self.layers[1].eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        assert not self.train().layers[1].training
        return self.layers(inputs)


class Hooked(nn.Module):
    """The user's hooks on modules and tensors, which change what flows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
        self.layers[2].register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 0.5,))
        self.layers[0].weight.register_hook(lambda gradient: gradient * 2)
        self.layers[2].bias.register_post_accumulate_grad_hook(_halve)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient * 0.9)
        return outputs


def _halve(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(0.5)


class Recurrent(nn.Module):
    """An LSTM, whose weights share one flat memory where they may, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(2, 6), nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(24, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.first(inputs.view(len(inputs), -1, 2))
        hidden = self.lstm(first)[0] + first
        return self.head((self.attention(hidden, hidden, hidden)[0] + hidden).flatten(1))


def compiled() -> nn.Module:
    return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]


def slow_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)


JOINED: dict[str, Case] = {
    "weight_norm as a hook": Case(old_weight_norm),
    "weight_norm": Case(weight_norm, adamw),
    "orthogonal": Case(orthogonal, slow_sgd),
    "spectral_norm": Case(spectral_norm, slow_sgd),
    "complex": Case(Complex, adamw),
    "complex, momentum": Case(Complex, slow_sgd),
    "lazy": Case(Lazy, adamw),
    "checkpointed, reentrant": Case(Reentrant),
    "channels_last": Case(Images, adamw),
    "batch norm in eval()": Case(FineTuned, adamw),
    "hooks": Case(Hooked, slow_sgd),
    "lstm and attention": Case(Recurrent, adamw),
    "compiled": Case(compiled, adamw),
}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize("case", JOINED.values(), ids=JOINED)
def test_a_model_equals_plain_pytorch(case: Case, cluster: Mapping[str, Any]) -> None:
    check_joined(case, cluster)


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
@pytest.mark.parametrize("build", [case.build for case in JOINED.values()], ids=JOINED)
def test_a_model_learns_with_groups(build: Callable[[], nn.Module], cluster: Mapping[str, Any]) -> None:
    gentle = Case(build, lambda model: torch.optim.SGD(model.parameters(), lr=0.05), steps=20)
    check_asynchronous(gentle, cluster, 0.9)


# Where a worker's part matters: rounding, and what only some workers use.


class Autocast(nn.Module):
    """bfloat16 inside, in the forward's own context."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(inputs).to(inputs.dtype)


class Expert(Drop):
    """Each worker has an expert that it alone uses; one is nobody's, and a head nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 4) for _ in range(5))
        self.forgotten = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[self.seed](self.shared(inputs).tanh())


def normed_images() -> nn.Module:
    """Batch norm in two dimensions, in channels_last."""
    model = Images()
    model.layers.insert(1, nn.BatchNorm2d(8))
    return model


PARTS: dict[str, tuple[Case, torch.dtype]] = {
    "batch norm of pictures": (Case(normed_images, adamw), torch.float64),
    "float16": (Case(mlp, slow_sgd), torch.float16),
    "float16, Adam": (
        Case(mlp, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-4)),
        torch.float16,
    ),
    "bfloat16": (Case(Images, adamw), torch.bfloat16),
    "autocast": (Case(Autocast, adamw), torch.float32),
    "an expert on each worker": (Case(Expert, adamw), torch.float64),
    "an expert on each worker, momentum": (Case(Expert, sgd), torch.float32),
}


@pytest.mark.parametrize("cluster", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize(("case", "dtype"), PARTS.values(), ids=PARTS)
def test_a_model_equals_the_average_of_parts(
    case: Case, dtype: torch.dtype, cluster: Mapping[str, Any]
) -> None:
    check_parts(case, cluster, dtype)


@pytest.mark.parametrize("cluster", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_what_no_group_uses_stays_as_it_was(cluster: Mapping[str, Any]) -> None:
    start = values_of(Case(Expert).model())
    for values in clustered(Case(Expert, adamw), cluster).results.values():
        for name in (name for name in start if "forgotten" in name or "experts.4" in name):
            assert torch.equal(values[name], start[name]), name
        assert not torch.equal(values["shared.weight"], start["shared.weight"])


# What else must stay as it is.


@pytest.mark.parametrize("cluster", [*SYNCHRONOUS.values(), *ASYNCHRONOUS.values()])
def test_layouts_are_kept(cluster: Mapping[str, Any]) -> None:
    strides = [p.stride() for p in Case(Images).model().parameters()]
    report = clustered(Case(Images), cluster, after=lambda run, m: [p.stride() for p in m.parameters()])
    assert strides[0] != (18, 9, 3, 1)
    assert all(found == strides for found in report.results.values())


class Tied(nn.Module):
    """A language model's: the head's weight is the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(4, WIDTH), mlp(), nn.Linear(WIDTH, 4, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.table((inputs[:, 0] > 0).long()) + inputs) + self.inner(inputs)


@pytest.mark.parametrize("cluster", [*SYNCHRONOUS.values(), *ASYNCHRONOUS.values()])
def test_tied_weights_stay_tied_through_a_file(cluster: Mapping[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"

    def after(run: Any, model: Any) -> Any:
        run.save(file)
        assert model.head.weight is model.table.weight
        return values_of(model)

    values = clustered(Case(Tied, adamw), cluster, after=after).results["worker 0.0"]
    fresh = Tied().double()
    fresh.load_state_dict(load_file(file))
    assert fresh.head.weight is fresh.table.weight
    same(values_of(fresh), values)

    def again(run: Run) -> bool:
        model, batch = deepcopy(fresh), (torch.ones(2, WIDTH).double(), torch.ones(2, 4).double())
        optimizer = adamw(model)
        run.prepare(model, optimizer)
        fit(model, optimizer, [batch])
        moved = not torch.equal(model.head.weight, fresh.head.weight)
        return moved and model.head.weight is model.table.weight

    assert all(run_cluster(again, cluster).results.values())


def test_a_compiled_models_file_has_plain_names(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    clustered(Case(compiled), SYNCHRONOUS["sandblaster"], after=lambda run, model: run.save(file))
    fresh = mlp().double()
    fresh.load_state_dict(load_file(file))
    assert {name.removeprefix("_orig_mod.") for name in plain(Case(compiled))} == set(load_file(file))
