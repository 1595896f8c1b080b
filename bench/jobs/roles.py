"""What the small programs that are measured have in common: their command line."""

from __future__ import annotations

import sys
from collections.abc import Callable


def play(serve: Callable[..., None], work: Callable[..., None]) -> None:
    """Be what the first argument says: ``serve PATH NUMBER…`` or ``work PATH BELL NUMBER…``."""
    role, path, *rest = sys.argv[1:]
    if role == "serve":
        serve(path, *map(int, rest))
    else:
        bell, *numbers = rest
        work(path, bell, *map(int, numbers))
