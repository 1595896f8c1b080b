"""Clothes (Fashion-MNIST, 60,000 small pictures in ten classes) with a small convolutional network.

    python examples/fashion.py                                        one process
    shoal run --cluster allreduce examples/fashion.py --epochs 2      the same script on three members

--data is a folder with the four IDX files, gzipped or not. Debian's package dataset-fashion-mnist brings them
where they are looked for, and torchvision's FashionMNIST(root, download=True) leaves them in
root/FashionMNIST/raw.
"""

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

DEBIAN = Path("/usr/share/datasets/fashion-mnist")

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=DEBIAN, help=f"folder with the IDX files ({DEBIAN})")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=64, help="pictures per worker and step")
parser.add_argument("--save", metavar="FILE", help="write the trained model there (safetensors)")
arguments = parser.parse_args()


def idx(name: str) -> Tensor:
    """An IDX file of bytes: two zeros, the type, how many sizes; the sizes; the values."""
    path = arguments.data / name
    packed = path.with_name(name + ".gz")
    if not path.exists() and not packed.exists():
        sys.exit(
            f"{path}[.gz] is not there: install Debian's dataset-fashion-mnist, or let torchvision download "
            "it (FashionMNIST(root, download=True)) and pass --data root/FashionMNIST/raw"
        )
    content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    sizes = np.frombuffer(content, ">i4", count=content[3], offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes))
    return torch.tensor(values.reshape(tuple(sizes)))


def dataset(part: str) -> TensorDataset:
    """Pictures (count × 1 × 28 × 28) from 0 to 1, and their classes (count)."""
    pictures, classes = idx(f"{part}-images-idx3-ubyte"), idx(f"{part}-labels-idx1-ubyte")
    return TensorDataset(pictures.unsqueeze(1).float() / 255, classes.long())


train, test = dataset("train"), dataset("t10k")

run = shoal.init()
torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, stride=2, padding=2),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 7 * 7, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(train, batch_size=arguments.batch)


@torch.no_grad()
def tested() -> tuple[float, float]:
    """The part of the test's pictures that are told right, and the mean loss."""
    model.eval()
    right = lost = 0.0
    for pictures, classes in zip(*(part.split(500) for part in test.tensors), strict=True):
        scores = model(pictures)
        right += float((scores.argmax(1) == classes).sum())
        lost += float(F.cross_entropy(scores, classes, reduction="sum"))
    model.train()
    return right / len(test), lost / len(test)


for _ in run.epochs(arguments.epochs):
    for pictures, classes in loader:
        loss = F.cross_entropy(model(pictures), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)

accuracy, test_loss = run.evaluate(tested)
run.log(test_accuracy=accuracy, test_loss=test_loss)
if run.is_main:
    print(f"test accuracy {accuracy:.4f}")
if arguments.save:
    run.save(arguments.save)
