"""Pictures learnt by one to four groups as well as by one synchronous group of as many workers.

At equal samples: every run sees each picture as often, and `batch_size` is per worker. Rates are not lowered
for the groups, and their steps are not tied to each other. Synchronous runs repeat bit for bit; asynchronous
ones have come out less than a point below, so that a whole point says something.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import ALLREDUCE, SANDBLASTER
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal import Run
from shoal.config import Cluster, Config
from shoal.testing import QUICK, run_cluster
from shoal.topology import Topology

POINT = 0.01
FASHION = Path("/usr/share/datasets/fashion-mnist")
PATIENT = QUICK.model_copy(update={"values": 60.0, "finish": 60.0, "evaluate": 60.0})

GROUPS: dict[str, dict[str, Any]] = {
    "downpour, 2 groups": {"nworker_groups": 2, "server_worker_separate": True},
    "downpour, 3 groups": {"nworker_groups": 3, "server_worker_separate": True},
    "downpour, 4 groups": {"nworker_groups": 4, "server_worker_separate": True},
    "downpour, 2 groups of 2": {
        "nworker_groups": 2,
        "nworkers_per_group": 2,
        "nservers_per_group": 2,
        "server_worker_separate": True,
    },
    "hogwild, 2 groups": {"nworker_groups": 2, "nserver_groups": 2},
    "hogwild, 3 groups": {"nworker_groups": 3, "nserver_groups": 3},
    "hogwild, 4 groups": {"nworker_groups": 4, "nserver_groups": 4},
    "hybrid, 4 groups": {"nworker_groups": 4, "nserver_groups": 2},
}


class Pictures:
    """A task: pictures, their classes, a network, and for how long it learns.

    Args:
        load: gives pictures (count × features) from 0 to 1 and their classes (count).
        train: how many of them are learnt from; the others are the test.
    """

    def __init__(
        self, load: Callable[[], tuple[Tensor, Tensor]], train: int, hidden: int, epochs: int, rate: float
    ) -> None:
        pictures, classes = load()
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
        self.train = TensorDataset(pictures[order[:train]], classes[order[:train]])
        self.test = pictures[order[train:]], classes[order[train:]]
        torch.manual_seed(1)
        self.start = nn.Sequential(nn.Linear(pictures.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.epochs, self.rate = epochs, rate
        self.synchronous = functools.cache(self._synchronous)

    def accuracy(self, cluster: Mapping[str, Any]) -> float:
        """What a cluster reaches, on the test pictures."""
        config = Config(cluster=Cluster(**cluster), timeouts=PATIENT)
        return run_cluster(self._learn, config).results["worker 0.0"]  # type: ignore[no-any-return]

    def _synchronous(self, workers: int) -> float:
        return self.accuracy({"nworkers_per_group": workers, "server_worker_separate": True})

    def _learn(self, run: Run) -> float:
        model = deepcopy(self.start)
        optimizer = torch.optim.Adam(model.parameters(), self.rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        run.prepare(model, optimizer)
        loader = run.loader(self.train, batch_size=32)
        for _ in run.epochs(self.epochs):
            for pictures, classes in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(pictures), classes).backward()
                optimizer.step()
            scheduler.step()
        return run.evaluate(self._test, model)

    @torch.no_grad()
    def _test(self, model: nn.Module) -> float:
        pictures, classes = self.test
        return (model(pictures).argmax(1) == classes).float().mean().item()


def digits() -> tuple[Tensor, Tensor]:
    pictures, classes = load_digits(return_X_y=True)
    return torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(classes)


def clothes() -> tuple[Tensor, Tensor]:
    """The 10,000 test pictures of Fashion-MNIST."""
    if not FASHION.is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    contents = [gzip.decompress((FASHION / f"t10k-{kind}-ubyte.gz").read_bytes()) for kind in KINDS]
    pictures = torch.tensor(np.frombuffer(contents[0], np.uint8, offset=16).reshape(-1, 784) / 255)
    return pictures.float(), torch.tensor(np.frombuffer(contents[1], np.uint8, offset=8)).long()


KINDS = ("images-idx3", "labels-idx1")


@pytest.fixture(scope="module")
def some_digits() -> Pictures:
    return Pictures(digits, train=900, hidden=64, epochs=20, rate=0.01)


@pytest.fixture(scope="module")
def some_clothes() -> Pictures:
    return Pictures(clothes, train=6000, hidden=32, epochs=12, rate=0.003)


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["sandblaster", "allreduce"])
def test_one_group_learns_digits_as_one_process_does(cluster: dict[str, Any], some_digits: Pictures) -> None:
    """With as many samples in a step; the two frameworks do the same arithmetic."""
    assert some_digits.accuracy(cluster) == some_digits.synchronous(3) > 0.93


def reaches(pictures: Pictures, cluster: dict[str, Any]) -> bool:
    """Timing decides what asynchronous groups learn; a loss that is theirs would come back each time."""
    wanted = pictures.synchronous(len(Topology.of(Cluster(**cluster)).workers)) - POINT
    return any(pictures.accuracy(cluster) > wanted for _ in range(3))


@pytest.mark.parametrize("cluster", GROUPS.values(), ids=GROUPS)
def test_groups_learn_digits_as_well_as_one_group(cluster: dict[str, Any], some_digits: Pictures) -> None:
    assert reaches(some_digits, cluster)


@pytest.mark.parametrize("name", ["downpour, 4 groups", "hogwild, 3 groups"])
def test_groups_learn_clothes_as_well_as_one_group(name: str, some_clothes: Pictures) -> None:
    """A part of them; scripts/accuracy takes all."""
    assert reaches(some_clothes, GROUPS[name])
