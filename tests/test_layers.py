"""The direction of imports: a module may import only what stands before it in the list."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import shoal

ROOT = Path(shoal.__file__).parent

PURE = (
    "errors",
    "config",
    "topology",
    "partition",
    "limits",
    "ledger",
    "acts",
    "clocks",
    "shares",
    "admission",
    "sampling",
    "leases",
)
LAYERS = (
    *PURE,
    "rundir",
    "events",
    "summary",
    "wire",
    "rows",
    "codecs",
    "staging",
    "parameters",
    "models",
    "updater",
    "asynchrony",
    "ema",
    "shard",
    "present",
    "keys",
    "transport",
    "sync",
    "feedback",
    "waiting",
    "start",
    "exchange",
    "snapshots",
    "edits",
    "rounds",
    "beside",
    "schedule",
    "totals",
    "server",
    "machine",
    "coordinator",
    "link",
    "store",
    "site",
    "machines",
    "collectives",
    "results",
    "batch",
    "stepping",
    "batchnorm",
    "arrivals",
    "overlap",
    "homes",
    "prepare",
    "own",
    "connection",
    "adoption",
    "randomness",
    "sources",
    "streams",
    "options",
    "data",
    "evaluation",
    "files",
    "training",
    "run",
    "session",
    "launcher",
    "probe",
    "budget",
    "doctor",
    "commands",
    "cli",
    "testing",
    "function",
)
DOORS = ("shoal", "shoal.__main__")  # what a user comes in by; they hold no code of their own

# What a pure rule has no business with: tensors, other members, the time.
IMPURE = {"torch", "socket", "zmq", "time", "datetime", "asyncio", "threading", "subprocess"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def name_of(path: Path) -> str:
    """shoal/config/schema.py → "shoal.config.schema"; a folder's __init__.py has the folder's name."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of the modules that a module imports, wherever in it that stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "an import names the whole path"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in TREES else node.module


def layer(module: str) -> str:
    """shoal.config.schema → "config"; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def ours(module: str) -> set[str]:
    """The modules of the package that a module of it imports, the package itself aside."""
    found = {name for name in imported(TREES[module]) if name.partition(".")[0] == "shoal"}
    assert found <= TREES.keys(), f"{module} imports {found - TREES.keys()}"
    return found - {"shoal", module}


def test_the_list_names_every_module() -> None:
    assert sorted(LAYERS) == sorted({layer(module) for module in TREES if module not in DOORS})


def test_imports_go_down_the_list() -> None:
    wrong = [
        f"{module} imports {other}"
        for module in TREES
        if module not in DOORS
        for other in ours(module)
        if LAYERS.index(layer(other)) > LAYERS.index(layer(module))
    ]
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({module: ours(module) for module in TREES}).prepare()  # raises CycleError


def test_pure_modules_know_no_tensors_no_wires_and_no_clock() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, tree in TREES.items()
        if layer(module) in PURE
        for other in imported(tree)
        if other.partition(".")[0] in IMPURE
    ]
    assert wrong == []


def test_only_the_launcher_reads_the_environment() -> None:
    readers = {
        layer(module)
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & ENVIRONMENT)
    }
    assert readers == {"launcher"}


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, shoal.commands, shoal.launcher.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_readme_lists_the_modules_in_this_order() -> None:
    readme = (ROOT.parent / "README.md").read_text()
    listed = re.findall(r"^  (\w+)(?:\.py |/$)", readme, re.MULTILINE)
    assert [name for name in listed if name in LAYERS] == list(LAYERS)
