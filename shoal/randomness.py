"""The global random generators of torch (CPU), numpy and random, taken over for a while and given back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch


class Randomness:
    """A course of the global generators of one's own; outside of it theirs goes on as if it had not been.

    Args:
        seed: 0 … 2**63 − 1; where the course begins.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """What the block draws comes from this course, which goes on in the next such block."""
        with _alone:  # workers that are threads share the generators
            outside = _states()
            if self._states is None:
                _seed_all(self._seed)
            else:
                _restore(self._states)
            try:
                yield
            finally:
                self._states = _states()
                _restore(outside)


def fresh(generator: Any, seed: int) -> Any:
    """A seeded generator of the same kind; None if it is no generator."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed)
    if isinstance(generator, np.random.Generator):
        return np.random.default_rng(seed)
    return random.Random(seed) if isinstance(generator, random.Random) else None


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


_alone = RLock()


def _unlock() -> None:
    global _alone
    _alone = RLock()


os.register_at_fork(after_in_child=_unlock)  # another thread may hold it at that moment
