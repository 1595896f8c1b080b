"""Shoal trains PyTorch models on groups of workers and parameter servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.function import launch
    from shoal.launcher.torchrun import init
    from shoal.run import Run

__all__ = ["Run", "__version__", "init", "launch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The command line starts without torch, so what needs it is imported when it is first asked for.
    if name == "Run":
        from shoal.run import Run

        return Run
    if name == "init":
        from shoal.launcher.torchrun import init

        return init
    if name == "launch":
        from shoal.function import launch

        return launch
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
