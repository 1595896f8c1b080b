"""What the scripts beside this file train: a small network on points of four classes."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def points(count: int, seed: int) -> TensorDataset:
    """Points (count × 8) and their classes (count)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


class Net(nn.Sequential):
    """Scores (batch × 4); its start is always the same."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.double().parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)


@torch.no_grad()
def accuracy(model: nn.Module, device: torch.device) -> float:
    """The part of the test points whose class is found."""
    inputs, classes = (tensor.to(device) for tensor in test.tensors)
    found: Tensor = model(inputs).argmax(1)
    return (found == classes).double().mean().item()


train, test = points(192, seed=2), points(100, seed=3)
