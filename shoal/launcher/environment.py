"""What a process is told through the environment: its rank by torchrun, a few settings by the user."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Which of how many processes this one is.

    Attributes:
        rank: its number over all machines, of `world_size`.
        local_rank: its number on this machine, of `local_world_size`.
        address, port: where the store is through which the ranks find each other.
        job: torchrun's name for the job; "" where torchrun has not started this process.
        attempt: how often torchrun has started the processes of this machine again.
        hosted: whether the store is there already; else rank 0 makes it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    job: str = ""
    attempt: int = 0
    hosted: bool = False

    @property
    def together(self) -> bool:
        """Whether all ranks were started on this machine, as one."""
        return self.local_world_size == self.world_size


def place() -> Place | None:
    """This process's place among those that torchrun has started; None if it is none of them.

    Whoever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT counts as torchrun.
    """
    given = os.environ
    if not all(name in given for name in RANKS):
        return None
    rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
    return Place(
        rank=rank,
        world_size=size,
        local_rank=int(given.get("LOCAL_RANK", rank)),
        local_world_size=int(given.get("LOCAL_WORLD_SIZE", size)),
        address=given["MASTER_ADDR"],
        port=int(given["MASTER_PORT"]),
        job=given.get("TORCHELASTIC_RUN_ID", ""),
        attempt=int(given.get("TORCHELASTIC_RESTART_COUNT", 0)),
        hosted=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def job() -> Place | None:
    """This process's place in a job of torchrun's own; None if torchrun itself has not started it."""
    found = place()
    return found if found is not None and found.job else None


def cluster() -> str | None:
    """SHOAL_CLUSTER: a preset or a file, for scripts that torchrun starts."""
    return os.environ.get("SHOAL_CLUSTER") or None


def secret_file() -> Path:
    """Where this machine has the secret that locks the wires between machines: SHOAL_SECRET_FILE names it."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("SHOAL_SECRET_FILE") or Path(home) / "shoal" / "secret")


def lead_gloo(interface: str | None) -> None:
    """Let torch's own groups use this interface, unless the user has named one."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def run_dir() -> Path | None:
    """SHOAL_RUN_DIR: where a run that torchrun starts writes."""
    given = os.environ.get("SHOAL_RUN_DIR")
    return Path(given) if given else None
