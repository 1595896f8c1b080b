"""Handwritten digits (scikit-learn's, nothing to download) with a small network.

python examples/digits.py                                   one process
shoal run --cluster downpour examples/digits.py --epochs 5  the same script on six members
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--save", metavar="FILE", help="write the trained model there (safetensors)")
arguments = parser.parse_args()

images, digits = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
digits = torch.tensor(digits)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]

run = shoal.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(TensorDataset(images[train], digits[train]), batch_size=32)


@torch.no_grad()
def accuracy() -> float:
    return (model(images[test]).argmax(1) == digits[test]).float().mean().item()


for _ in run.epochs(arguments.epochs):
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    scheduler.step()

result = run.evaluate(accuracy)
run.log(test_accuracy=result)
if run.is_main:
    print(f"test accuracy {result:.4f}")
if arguments.save:
    run.save(arguments.save)
