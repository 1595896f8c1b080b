"""A small transformer learns to go on writing a text, character by character.

    python examples/charlm.py --text mine.txt                           one process
    shoal run --cluster downpour examples/charlm.py --text mine.txt     the same script on six members

Any UTF-8 text will do; without one it learns Shoal's README. The last tenth is kept for the test.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "README.md")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=16, help="windows per worker and step")
parser.add_argument("--context", type=int, default=64, help="characters in a window")
parser.add_argument("--width", type=int, default=64, help="of the transformer")
parser.add_argument("--save", metavar="FILE", help="write the trained model there (safetensors)")
arguments = parser.parse_args()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text (a vector of numbers), each with the characters that come next."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        window = self.text[number * self.context : (number + 1) * self.context + 1]
        return window[:-1], window[1:]


class Writer(nn.Module):
    """Scores (batch × context × letters) for the character after each of (batch × context)."""

    def __init__(self, letters: int, context: int, width: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.letter.weight  # tied
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )
        nn.init.normal_(self.letter.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.letter(text) + self.place.weight[: text.shape[1]]
        return self.head(self.body(hidden, mask=self.mask, is_causal=True))


content = arguments.text.read_text(encoding="utf-8")
letters = sorted(set(content))
number = {letter: place for place, letter in enumerate(letters)}
text = torch.tensor([number[letter] for letter in content])
cut = len(text) * 9 // 10
train, test = (Windows(part, arguments.context) for part in (text[:cut], text[cut:]))
if not len(train) or not len(test):
    parser.error(
        f"{arguments.text} is too short: --context {arguments.context} needs 10 times as much and more"
    )

run = shoal.init()
torch.manual_seed(1)
model = Writer(len(letters), arguments.context, arguments.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=arguments.steps)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(train, batch_size=arguments.batch)


def loss_of(text: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


@torch.no_grad()
def test_loss() -> float:
    model.eval()
    total = sum(loss_of(*batch).item() * len(batch[0]) for batch in DataLoader(test, batch_size=64))
    model.train()
    return total / len(test)


for windows, following in run.steps(loader, arguments.steps):
    loss = loss_of(windows, following)
    optimizer.zero_grad()
    loss.backward()
    run.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    run.log(loss=loss)

result = run.evaluate(test_loss)
run.log(test_loss=result)
if run.is_main:
    print(f"test loss {result:.4f} per character (guessing: {torch.tensor(len(letters)).log():.4f})")
if arguments.save:
    run.save(arguments.save)
