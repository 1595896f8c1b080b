"""One table from the summaries of several runs: ``table.py SUMMARY…``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("framework", "workers", "processes", "steps", "accuracy", "staleness (mean, max)", "seconds")


def row(summary: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one run; "-" where a run has nothing to say."""
    staleness = summary["staleness"]
    cluster = summary["cluster"]
    return (
        summary["framework"],
        f"{cluster['nworker_groups']} × {cluster['nworkers_per_group']}",
        str(summary["processes"]),
        str(max(summary["steps"].values())),
        number(summary["final"].get("test_accuracy"), ".4f"),
        f"{number(staleness['mean'], '.2f')}, {number(staleness['max'], 'd')}",
        number(summary["wall_seconds"], ".1f"),
    )


def number(value: float | None, form: str) -> str:
    """A number in this form, "-" for None."""
    return "-" if value is None else format(value, form)


def main() -> None:
    """Prints the table."""
    table = Table(*COLUMNS)
    for path in sys.argv[1:]:
        table.add_row(*row(json.loads(Path(path).read_text())))
    Console().print(table)


if __name__ == "__main__":
    main()
