"""Who owns how many bytes, and the memory each member needs: read off a script that is run up to `prepare()`.

``python -m shoal.budget CONFIG SCRIPT [ARGS...]`` prints it; CONFIG is a configuration as JSON. Nothing is
trained and no server is started.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch

from shoal.codecs import Coding, dtype_of, wide
from shoal.config import Config
from shoal.ema import bytes_of
from shoal.launcher import FAILED, FINISHED
from shoal.own import steps_itself
from shoal.partition import ITEMSIZE, Chunk, Plan
from shoal.probe import Seen, look
from shoal.rows import Rows
from shoal.shard import pieces_in, updated_in
from shoal.topology import Member, Topology, table
from shoal.training import Prepared
from shoal.updater import Updater, resolve

LINES = 20  # parameters that are listed one by one


@dataclass(frozen=True)
class Need:
    """What one member holds, in bytes; ``elements`` counts its parameters'.

    Attributes:
        parameters: values; a server's masters and moving averages too, where there are any.
        optimizer: state after a step in which every parameter had a gradient.
        gradients: a worker's own; or the shares that a server keeps, one of each worker at the most.
        copies: a worker's slots, those of sparse tables aside, which hold a step's rows only; with
            ``wire_dtype`` also what it last had, and what encoding has cut off. Of a server: what each group
            was last sent, where that is not the values themselves, and what its exchange with other server
            groups starts from.

    Where a worker steps on the model itself, values and shares are its own. Its optimizer's state is listed
    with the server beside it, and in ``copies`` what others have changed and the worker has not taken in yet.
    """

    elements: int
    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    copies: int

    @property
    def together(self) -> int:
        """All bytes."""
        return self.parameters + self.buffers + self.optimizer + self.gradients + self.copies


def of_server(prepared: Prepared, config: Config, server: Member) -> Need:
    """What a server needs."""
    topology = Topology.of(config.cluster)
    wide = config.cluster.server_dtype == "float32"
    chunks = prepared.plan.chunks_of(server.index)
    trained = [chunk for chunk in chunks if chunk.buffer is None]
    averages = 0 if prepared.ema is None else sum(bytes_of(chunk) for chunk in trained)
    masters = sum(c.size * 4 for c in trained if updated_in(c, wide) != c.dtype)
    followed = [chunk for chunk in chunks if topology.synchronised and chunk.master != server.group]
    groups, coding = len(topology.worker_groups_of(server.group)), Coding.of(config.cluster)
    alone = groups == 1 and prepared.plan.server_groups == 1
    sent = [chunk for chunk in chunks if not chunk.row and (coding.applies(chunk) or not alone)]
    elements, state = sum(chunk.size for chunk in trained), sum(_state(prepared, c, config) for c in trained)
    if topology.paired(server) and steps_itself(config.cluster, prepared.plan, prepared.ema):
        waiting = _bytes(chunks) if topology.synchronised else 0
        return Need(elements, 0, 0, state, 0, copies=_bytes(followed) + waiting)
    return Need(
        elements=elements,
        parameters=_bytes(trained) + masters + averages,
        buffers=_bytes(chunk for chunk in chunks if chunk.buffer is not None),
        optimizer=state,
        gradients=_bytes(chunks) * len(topology.workers_of(server)),
        copies=_bytes(followed) + _bytes(sent) * groups,
    )


def of_worker(prepared: Prepared, config: Config) -> Need:
    """What a worker needs, its activations aside."""
    plan, groups = prepared.plan, [g for o in prepared.optimizers for g in o.param_groups]
    coding = Coding.of(config.cluster)
    coded = [chunk for chunk in plan.chunks if coding.applies(chunk)]
    cut_off = 2 * sum(c.size * wide(dtype_of(c)).itemsize for c in coded) if coding.feedback else 0
    return Need(
        elements=sum(parameter.numel for parameter in plan.parameters),
        parameters=sum(parameter.nbytes for parameter in plan.parameters),
        buffers=sum(buffer.numel * ITEMSIZE[buffer.dtype] for buffer in plan.buffers),
        optimizer=0,
        gradients=sum(t.nbytes for t in {t for g in groups for t in g["params"]} if t.requires_grad),
        copies=_bytes(chunk for chunk in plan.chunks if not chunk.row) + _bytes(coded) + cut_off,
    )


def _bytes(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.nbytes for chunk in chunks)


def _state(prepared: Prepared, chunk: Chunk, config: Config) -> int:
    """Bytes of a chunk's optimizer state: what one step that touches everything leaves behind.

    That step is taken without any memory where the optimizer can do it, else on zeros.
    """
    spec, plan = prepared.specs[chunk.optimizer], prepared.plan
    settings = [plan.parameters[piece.parameter].settings for piece in chunk.pieces]
    cls = resolve(spec.name, config.allow_optimizers)
    dtype = getattr(torch, updated_in(chunk, config.cluster.server_dtype == "float32"))

    def measured(device: str) -> int:
        values = torch.zeros(chunk.size, dtype=dtype, device=device)
        updater = Updater(cls, spec, pieces_in(values, plan, chunk), settings)
        zeros = torch.zeros_like(values)
        numbers = torch.arange(chunk.rows, device=device)
        updater.step(Rows(numbers, zeros.view(-1, chunk.row)) if chunk.row else zeros, None, spec.groups)
        return updater.state_bytes

    try:
        return measured("cpu" if chunk.row else "meta")  # sparse tensors without memory forget their rows
    except RuntimeError:  # it looks at numbers
        return measured("cpu")


def report(prepared: Prepared, config: Config) -> str:
    """What everyone owns and needs, for people: lines of plain text."""
    topology = Topology.of(config.cluster)
    head = "", "elements", "parameters", "buffers", "optimizer"
    servers: list[tuple[str, ...]] = [(*head, "shares ≤", "copies", "together ≤")]
    servers += [_row(server, of_server(prepared, config, server)) for server in topology.servers]
    workers: list[tuple[str, ...]] = [(*head, "gradients", "copies", "together")]
    workers += [_row(worker, of_worker(prepared, config)) for worker in topology.workers]
    besides = "Python and PyTorch themselves come on top, in each process, and a worker's activations."
    return "\n\n".join([table(servers), table(workers), besides, table(_places(prepared.plan))])


def _row(member: Member, need: Need) -> tuple[str, ...]:
    elements, *parts = astuple(need)
    return member.name, f"{elements:,}", *(_size(part) for part in (*parts, need.together))


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _places(plan: Plan) -> list[tuple[str, ...]]:
    """Each parameter with the servers of a group that hold it."""
    held: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for part in plan.slices:
        held[part.parameter][part.server] += part.stop - part.start
    rows: list[tuple[str, ...]] = []
    for number, parameter in enumerate(plan.parameters[:LINES]):
        shape = " × ".join(map(str, parameter.shape)) or "a number"
        where = ", ".join(f"{count:,} on server {server}" for server, count in sorted(held[number].items()))
        rows.append((parameter.name, shape, parameter.dtype, where or "has no elements"))
    if len(plan.parameters) > LINES:
        rows.append((f"and {len(plan.parameters) - LINES:,} more", "", "", ""))
    return rows


def inspect(config: Config, script: str, args: list[str]) -> int:
    """Run a script up to its first `prepare()` and print the report; the exit status."""
    seen: list[Prepared] = []

    def probe(prepared: Prepared) -> None:
        seen.append(prepared)
        raise Seen

    if not look(script, args, probe, config):
        return FAILED
    print(report(seen[0], config))
    return FINISHED


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, which is not on the path of ``python train.py``
    sys.exit(inspect(Config.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3:]))
