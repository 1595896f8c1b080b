"""Scenarios on one machine, with ``shoal run``."""

from __future__ import annotations

from dataclasses import replace

from bench.figures import Claim
from bench.scenarios.kinds import Rounds, Scenario, one_group, over, told
from bench.sides import Block, Job, Side, alone, echo, example, on_this_machine, page_server, peers


def naive_scenario() -> Scenario:
    job = Job("mnist", "sgd", warmup=50, steps=500, given=True)
    groups: Block = {"nworker_groups": 2, "server_worker_separate": True}
    rate = "pairs per second over naive"
    return Scenario(
        "naive",
        "MNIST MLP (203,530 parameters), 2 workers and 1 server, no computation; beside a parameter server "
        "of a page, which sends the whole model in one message and applies each push at once, and beside one "
        "in shared memory stripped of everything but copies, update and wake-ups",
        (
            page_server("naive", "naive.py", "mnist", 2, 500),
            page_server("stripped", "stripped.py", "mnist", 2, 500),
            on_this_machine("one group", job, one_group(2, 1, separate=True)),
            on_this_machine("two groups", job, groups),
        ),
        (
            over(f"one group: {rate}", ("one group", "rate"), ("naive", "rate"), 3.0, "more"),
            over(f"two groups: {rate}", ("two groups", "rate"), ("naive", "rate"), 3.0, "more"),
            over(f"stripped: {rate}", ("stripped", "rate"), ("naive", "rate"), None, "more"),
            over("one group: rate over stripped", ("one group", "rate"), ("stripped", "rate"), None, "more"),
        ),
    )


def local_scenario() -> Scenario:
    sides: list[Side] = []
    claims: list[Claim] = []
    digits = Job("digits", batch=32, warmup=100, steps=1500)
    for words, what, job in (
        ("digits MLP", "digits", digits),
        ("10 million parameters", "ten", Job("ten", batch=32, warmup=3, steps=30)),
        ("digits MLP, samples one by one", "list", replace(digits, listed=True)),
    ):
        plain, shoal = f"plain, {what}", f"shoal, {what}"
        sides += [alone(plain, job), on_this_machine(shoal, job, {})]
        claims.append(over(f"{words}: step over the plain loop", (shoal, "step_s"), (plain, "step_s"), 1.03))
    about = "One worker on one machine beside a plain PyTorch loop, Adam, with a loader, one thread"
    return Scenario("local", about, tuple(sides), tuple(claims), rounds=5)


def loopback_scenario() -> Scenario:
    job = Job("lan", warmup=5, steps=40)
    return Scenario(
        "loopback",
        "AllReduce between 4 processes of one machine, 10.5 MB, Adam, no computation but the model's own",
        (
            on_this_machine("shoal", job, one_group(4, 4, separate=False)),
            peers("ddp", job, 4),
            peers("zero", job, 4),
            peers("fsdp", job, 4),
        ),
        (
            over("step over DDP", ("shoal", "step_s"), ("ddp", "step_s"), 1.0),
            over("step over DDP with ZeRO", ("shoal", "step_s"), ("zero", "step_s")),
            over("step over FSDP2", ("shoal", "step_s"), ("fsdp", "step_s")),
            over("optimizer memory over DDP", ("shoal", "state_bytes"), ("ddp", "state_bytes"), 0.30),
        ),
    )


def server_update_scenario() -> Scenario:
    job = Job("ten", warmup=3, steps=30, given=True)
    return Scenario(
        "server-update",
        "How much a server updates in the time of its main thread (receive, admit, apply, reply): 10 million "
        "parameters, Adam, 1 worker, beside the bare torch optimizer on the same tensors",
        (alone("bare", job), on_this_machine("shoal", job, one_group(1, 1, separate=True))),
        (
            over(
                "throughput over the bare optimizer",
                ("bare", "optimizer_s"),
                ("shoal", "server_loop_s"),
                0.6,
                "more",
            ),
        ),
    )


def start_scenario() -> Scenario:
    job = Job("digits", warmup=1, steps=1)
    six: Block = {
        "nworker_groups": 2,
        "nworkers_per_group": 2,
        "nservers_per_group": 2,
        "server_worker_separate": True,
    }
    return Scenario(
        "start",
        "From the command to the last worker's first step: Downpour with 4 workers and 2 servers, "
        "Sandblaster with 16 and 16",
        (
            on_this_machine("6 members", job, six),
            on_this_machine("32 members", job, one_group(16, 16, separate=True)),
        ),
        (
            told("6 members: seconds", ("6 members", "start_s"), 3.0),
            told("32 members: seconds", ("32 members", "start_s"), 12.0),
        ),
    )


def memory_scenario() -> Scenario:
    """A resident set counts all of the memory that members share, a proportional set a member's part.

    A server's values are in the resident sets of both. So a worker is judged by its proportional set at the
    end, when all that it keeps is there, and beside it stands the peak, with the server's values in it.
    """
    block = one_group(1, 1, separate=True)
    big = Job("giga", warmup=1, steps=2)
    sides = (
        on_this_machine("tiny", Job("digits", warmup=1, steps=2), block),
        on_this_machine("1 GB", big, block),
        on_this_machine("1 GB, hold", replace(big, hold=True), block),
    )
    claims = []
    for side, figure, bound in (
        ("1 GB", "worker_pss", 3.2),
        ("1 GB", "worker_peak", None),
        ("1 GB, hold", "worker_pss", 2.2),
        ("1 GB, hold", "worker_peak", None),
        ("1 GB", "server_pss", None),
        ("1 GB", "server_peak", 4.06),
    ):
        claims.append(_grown(f"{side}: {figure}", side, figure, bound))
    about = (
        "A model of 1 GB, Adam, 1 worker and 1 server of one machine: memory beyond that of the same run "
        "with a tiny model, in sizes of the model (a server's Adam state is 2)"
    )
    return Scenario("memory", about, sides, tuple(claims), rounds=1)


def _grown(what: str, side: str, figure: str, bound: float | None) -> Claim:
    """Memory beyond that of the same process with a tiny model, in models."""

    def ratio(sides: Rounds) -> float:
        return (sides[side][figure] - sides["tiny"][figure]) / sides[side]["model_bytes"]

    return Claim(what, ratio, ("tiny", side), bound)


def cpu_scenario() -> Scenario:
    job = Job("ten", "sgd", warmup=3, steps=30, given=True)
    return Scenario(
        "cpu",
        "CPU seconds to move 40 MB there and back, beside a bare copy over a UNIX socket: 1 worker, 1 "
        "server, SGD, gradients without computation (the update and PyTorch's own handling of gradients are "
        "in it)",
        (echo("copy", "ten", 30), on_this_machine("shoal", job, one_group(1, 1, separate=True))),
        (
            over("worker over the copy's", ("shoal", "worker_cpu_s"), ("copy", "worker_cpu_s"), 1.5),
            over("server over the copy's", ("shoal", "server_cpu_s"), ("copy", "server_cpu_s"), 1.5),
        ),
    )


def wire_dtype_scenario() -> Scenario:
    block: Block = {**one_group(2, 2, separate=True), "transport": "tcp", "share_memory": False}
    dtypes = {"float32": None, "bfloat16": 1.9, "float16": None, "int8": 3.5, "topk": None}
    sides, claims = [], []
    for dtype, bound in dtypes.items():
        sides.append(example(dtype, "fashion.py", {**block, "wire_dtype": dtype}))
        if dtype != "float32":
            what = ("float32", "sent_bytes"), (dtype, "sent_bytes")
            claims.append(over(f"{dtype}: fewer bytes, both directions", *what, bound, "more"))
            claims.append(_points_lost(dtype, 0.5 if bound else None))
            claims.append(over(f"{dtype}: loss over float32's", (dtype, "loss"), ("float32", "loss")))
    about = "Fashion-MNIST, one epoch of examples/fashion.py, 2 workers and 2 servers: bytes, accuracy, loss"
    return Scenario("wire-dtype", about, tuple(sides), tuple(claims), rounds=1)


def _points_lost(dtype: str, bound: float | None) -> Claim:
    def lost(sides: Rounds) -> float:
        return 100 * (sides["float32"]["accuracy"] - sides[dtype]["accuracy"])

    return Claim(f"{dtype}: points of accuracy lost", lost, ("float32", dtype), bound)


SCENARIOS = (
    naive_scenario,
    local_scenario,
    loopback_scenario,
    server_update_scenario,
    start_scenario,
    memory_scenario,
    cpu_scenario,
    wire_dtype_scenario,
)
