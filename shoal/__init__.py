"""Shoal trains PyTorch models on groups of workers and parameter servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.session import Run, init

__all__ = ["Run", "__version__", "init"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The command line starts without torch, so what needs it is imported when it is first asked for.
    if name in ("Run", "init"):
        from shoal import session

        return getattr(session, name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
