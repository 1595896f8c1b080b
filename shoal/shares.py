"""The shares that have arrived at a server: which wait for their round, and which came twice."""

from __future__ import annotations

from collections import Counter

from shoal.acts import Release, Share


class Shares:
    """The latest share of each worker for each chunk, until its round closes or its worker's life is over."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], dict[int, Share]] = {}  # group, chunk → rank → share
        # Group, rank, chunk → the latest step, and the numbers that have arrived of it.
        self._seen: dict[tuple[int, int, int], tuple[int, set[int]]] = {}

    def repeats(self, share: Share) -> bool:
        """Whether the share has arrived before; notes that it has now."""
        key = (share.life.group, share.life.rank, share.chunk)
        step, numbers = self._seen.get(key, (0, set()))
        if share.step > step:
            step, numbers = self._seen[key] = (share.step, set())
        before = share.step < step or share.number in numbers
        numbers.add(share.number)
        return before

    def hold(self, share: Share) -> bool:
        """Keep the share; False if it, or a later one of its worker, is here already."""
        held = self._held.setdefault((share.life.group, share.chunk), {})
        rank = share.life.rank
        if rank in held and held[rank].number >= share.number:
            return False
        held[rank] = share
        return True

    def has(self, group: int, rank: int, chunk: int, number: int) -> bool:
        """Whether the share with this number is the one that is held."""
        held = self._held.get((group, chunk), {}).get(rank)
        return held is not None and held.number == number

    def base(self, group: int, rank: int, chunk: int) -> int:
        """The version that the gradient of the held share was computed on."""
        return self._held[group, chunk][rank].base

    def release(self, group: int, chunk: int) -> list[Release]:
        """Forget the group's shares of a chunk."""
        return [Release(group, rank, chunk) for rank in sorted(self._held.pop((group, chunk), {}))]

    def bury(self, group: int) -> tuple[list[Release], Counter[int]]:
        """Forget all of a group; returns also how many shares of the steps under way each rank had sent."""
        released: list[Release] = []
        sent = Counter[int]()
        for _, chunk in [key for key in self._held if key[0] == group]:
            for each in self.release(group, chunk):
                sent[each.rank] += len(self._seen[group, each.rank, chunk][1])
                released.append(each)
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] != group}
        return released, sent
