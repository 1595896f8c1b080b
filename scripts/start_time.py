"""How long a run takes from the command to its last worker's first step: ``start_time.py [TIMES]``.

The script that is run imports torch and shoal only, under Downpour: four workers and two servers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from shoal.events import read

SCRIPT = """\
import torch

import shoal

run = shoal.init()
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


def start_time(folder: Path) -> float:
    """Seconds of one run, which writes into an empty folder."""
    script, run_dir = folder / "script.py", folder / "run"
    script.write_text(SCRIPT)
    shoal = Path(sys.executable).with_name("shoal")
    began = time.time()
    subprocess.run(
        [shoal, "run", "--cluster", "downpour", "--run-dir", run_dir, script], check=True, capture_output=True
    )
    return max(first_step(path) for path in run_dir.glob("events/w*.jsonl")) - began


def first_step(path: Path) -> float:
    """When a worker finished its first step, in seconds since the epoch."""
    return float(next(event["time"] for event in read(path) if event["event"] == "progress"))


def main() -> None:
    """Runs it some times and prints the median."""
    seconds = []
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(start_time(Path(folder)))
    print(
        f"six members at their first step: median {median(seconds):.2f} s of {len(seconds)} runs"
        f" ({min(seconds):.2f} to {max(seconds):.2f} s)"
    )


if __name__ == "__main__":
    main()
