"""torchrun's own store, through which the ranks of a job give each other a first hint of where to meet.

Whoever reaches that store may read and write it. So nothing secret is left there, and what is found there is
believed only after a check of another kind: of a folder's owner, or of a key.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from shoal.errors import LaunchError
from shoal.launcher.environment import Place


class Hints:
    """Words between ranks.

    Args:
        limit: seconds that a word may be waited for (timeouts.start).
    """

    def __init__(self, place: Place, limit: float) -> None:
        self._place, self._limit = place, limit
        try:
            store = TCPStore(
                place.address,
                place.port,
                is_master=place.rank == 0 and not place.hosted,
                timeout=timedelta(seconds=limit),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise LaunchError(
                f"rank {place.rank} waited {limit:g} s (timeouts.start) for torchrun's store at "
                f"{place.address}:{place.port} ({str(error).splitlines()[0]})",
                remedy="see that MASTER_ADDR and MASTER_PORT are those of the first machine, and reachable",
            ) from None
        self._store = PrefixStore(f"shoal/{place.job}", store)

    def leave(self, key: str, word: str) -> None:
        """Leave a word for the others."""
        self._store.set(key, word)

    def count(self, key: str, amount: int) -> int:
        """Add to a number that all ranks see; the sum."""
        return int(self._store.add(key, amount))

    def find(self, key: str, what: str) -> str:
        """A word that another rank leaves; raises LaunchError if it has not come in time."""
        word = self.look(key, self._limit)
        if word is None:
            raise LaunchError(
                f"rank {self._place.rank} waited {self._limit:g} s (timeouts.start) for {what}",
                remedy="see what that rank printed; raise timeouts.start if it is only slow",
            )
        return word

    def look(self, key: str, limit: float) -> str | None:
        """A word that another rank leaves; None if it has not come within `limit` seconds."""
        try:
            self._store.wait([key], timedelta(seconds=limit))
            return str(self._store.get(key).decode())
        except RuntimeError:
            return None
