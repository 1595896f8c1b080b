"""What a run writes: the complete model, always or when it is the best so far."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import UsageError
from shoal.evaluation import Trained
from shoal.models import named_models, plain_name
from shoal.results import plain_value
from shoal.rows import Content


class Files:
    """The trained model as tensors and files."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._best: dict[str, float] = {}

    def state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """See Run.state_dict."""
        replica, exchange = self._trained.joined()
        asked = self._trained.asked(ema)
        self._trained.settle()
        values: dict[int, Content] = {**replica.snapshot()}
        if ema or not self._trained.left:
            pulled = exchange.pull(asked).values
            values |= {number: flat for number, flat in pulled.items() if flat is not None}
        current = replica.build(values)
        found: dict[str, Tensor] = {}
        for prefix, model in named_models(self._trained.models):
            for name, tensor in model.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    found[prefix + plain_name(name)] = current.get(tensor, tensor.detach()).clone()
        return found

    def save(self, path: str | os.PathLike[str], ema: bool = False) -> None:
        """See Run.save."""
        target = Path(path)
        if not target.parent.is_dir():
            raise UsageError(
                f"cannot save {target}: there is no folder {target.parent}", remedy="make it first"
            )
        partial = target.with_name(target.name + ".partial")
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict(ema).items()}, partial)
        os.replace(partial, target)

    def save_best(
        self, path: str | os.PathLike[str], metric: Any, mode: str, ema: bool, *, writes: bool
    ) -> bool:
        """See Run.save_best; `writes`: this worker does."""
        if mode not in ("min", "max"):
            raise UsageError(f"mode={mode!r} of a best model", remedy='give "max" or "min"')
        number = plain_value(metric)
        if type(number) not in (int, float):
            raise UsageError(
                f"a metric that is a {type(metric).__name__}: no number says which model is best",
                remedy="give a number, or a tensor of no dimensions",
            )
        best = self._best.get(os.fspath(path))
        better = number == number and (best is None or (number > best if mode == "max" else number < best))
        if better:
            if writes:
                self.save(path, ema)
            self._best[os.fspath(path)] = number
        return better
