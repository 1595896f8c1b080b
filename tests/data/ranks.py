"""What ranks train in tests: a small net, its first weights a pattern that a listener on the wire would know.

Options are words: steps=N; model=FILE, written at the end; cluster=NAME, for init(); fail=RANK, which raises
at its third step; kill=RANK, which is killed there in its first life; steps_file=FOLDER, with a file per rank
of as many bytes as it has taken steps; gather, between workers in each step.
"""

import os
import signal
import struct
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

words = dict(word.partition("=")[::2] for word in sys.argv[1:])
run = shoal.init(cluster=words.get("cluster"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 2))
with torch.no_grad():
    model[0].bias.fill_(*struct.unpack("<f", b"SHOA"))
    model[0].weight.mul_(0.1)
data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randint(2, (96,)))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
loader = run.loader(data, batch_size=4)
for step, (inputs, targets) in enumerate(run.steps(loader, int(words.get("steps", 6)))):
    if words.get("fail") == str(run.rank) and step == 2:
        raise ValueError("mine")
    if words.get("kill") == str(run.rank) and step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if "gather" in words:
        assert run.gather(run.rank_in_group) == list(range(run.world_size // run.num_groups))
    if folder := words.get("steps_file"):
        with (Path(folder) / str(run.rank)).open("ab") as file:
            file.write(b".")
total = run.evaluate(lambda: model[0].weight.sum().item())
print(f"rank {run.rank} of {run.world_size}, {run.local_rank} here: {total}")
if "model" in words:
    run.save(words["model"])
