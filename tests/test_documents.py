"""What the documents say is so: files, commands, versions, counts, defaults, and the script's diff."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
import typer.main
from torch.distributed.run import get_args_parser
from torch.utils.data import TensorDataset

import shoal
from shoal import wire
from shoal.commands import app
from shoal.config import PRESETS, Cluster, load
from shoal.config.readers import READERS
from shoal.config.schema import FIELDS, SECTIONS
from shoal.session import Run
from shoal.testing import run_cluster
from shoal.topology import Topology

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "porting") for path in folder.glob("*.md")
)
SHOAL: object = typer.main.get_command(app)


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for word, content in found if word == language]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every line of a table."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def the_tree() -> dict[str, str]:
    """README's list of files: path from the package's folder → what it says."""
    (block,) = (block for block in blocks(README, "") if block.startswith("shoal/"))
    found, folder = {}, ""
    for line in block.splitlines()[1:]:
        name, _, words = line.strip().partition(" ")
        depth = len(line) - len(line.lstrip())
        if name.endswith("/"):
            folder = name
        else:
            path = (folder if depth > 2 else "") + name
            assert path not in found, f"{path} stands there twice"
            found[path] = words.strip()
    return found


def test_the_file_tree_names_every_file_once_in_words() -> None:
    package = ROOT / "shoal"
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    tree = the_tree()
    assert set(tree) == files
    assert all(tree.values())


def commands() -> list[str]:
    """Every command line that a document shows."""
    lines = [
        line.partition("  #")[0].strip()
        for path in DOCUMENTS
        for block in blocks(path.read_text(), "sh")
        for line in block.splitlines()
    ]
    return sorted(set(filter(None, lines)))


@pytest.mark.parametrize("line", commands())
def test_commands_exist(line: str) -> None:
    program, *words = shlex.split(line)
    if program.startswith("SHOAL_CLUSTER="):
        source, (program, *words) = program.partition("=")[2], words
        assert source in PRESETS or Path(source).suffix in READERS
    if program == "torchrun":
        assert get_args_parser().parse_args(words).nproc_per_node.isdigit()
        if "shoal" in words:
            check_shoal(words[words.index("shoal") + 1 :])
    elif program == "shoal":
        check_shoal(words)
    elif program == "source":
        assert words == [".venv/bin/activate"]
    else:
        assert os.access(ROOT / program, os.X_OK), f"{program} cannot be run"


def check_shoal(words: list[str]) -> None:
    """A shoal command line parses, and names what exists."""
    group = SHOAL
    name, *rest = words
    command = group.get_command(None, name)  # type: ignore[attr-defined]
    assert command is not None, f"there is no shoal {name}"
    arguments = command.make_context(name, rest).params
    if name not in ("doctor", "secret"):
        source = arguments.get("cluster") or arguments["conf"]
        assert source in PRESETS or Path(source).suffix in READERS
    for setting in arguments.get("settings") or ():
        assert setting.partition("=")[0] in FIELDS
    script = arguments.get("script") or "train.py"
    assert script == "train.py" or (ROOT / script).is_file()


def test_the_scripts_are_all_told_of() -> None:
    told = "".join(path.read_text() for path in DOCUMENTS)
    scripts = [
        path.name for path in (ROOT / "scripts").iterdir() if os.access(path, os.X_OK) and path.is_file()
    ]
    assert [name for name in scripts if f"scripts/{name}" not in told and name != "environment"] == []


def test_links_lead_somewhere() -> None:
    missing = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert missing == []


def test_code_that_is_named_exists() -> None:
    """`Stepper._ready` and the like in docs/step.md are definitions in the package."""
    text = (ROOT / "docs" / "step.md").read_text()
    defined: set[str] = set()
    for path in (ROOT / "shoal").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.add(node.name)
                defined |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    named = set(re.findall(r"\b_?(?:[A-Z][a-z]+)+\.[a-z_]+\b", text)) - {"Net.parameters"}
    assert named and named <= defined


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == shoal.__version__ == wire.VERSION
    assert f"## {shoal.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tested_torch_is_installed_first_and_named_once() -> None:
    (pinned,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in (ROOT / "scripts" / "environment").read_text()
    assert torch.__version__.partition("+")[0] == pinned.removeprefix("torch==")


def test_every_requirement_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(n for extra in project["optional-dependencies"].values() for n in extra),
    ]
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in wanted} - {"shoal"}
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert sorted(names, key=str.lower) == sorted(pinned, key=str.lower)


def test_the_presets_table() -> None:
    told = {cells[0].strip("`"): cells[1:] for cells in rows(README) if cells[0].strip("`") in PRESETS}
    for name in PRESETS:
        topology = Topology.of(load(name).cluster)
        assert topology.framework == name
        assert told[name] == [
            f"{topology.worker_groups} × {topology.workers_per_group}",
            f"{topology.server_groups} × {topology.servers_per_group}",
            str(topology.separate).lower(),
            str(topology.processes),
        ]


def test_the_block_is_downpour() -> None:
    (block,) = (block for block in blocks(README, "") if block.startswith("cluster {"))
    assert block == PRESETS["downpour"]


def test_every_field_has_its_default_in_the_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    told = {cells[0].strip("`"): cells[1] for cells in rows(text) if cells[0].strip("`") in FIELDS}
    defaults = {
        name: str(field.default).lower() if field.default not in (None, ()) else "none"
        for name, field in FIELDS.items()
        if name not in SECTIONS
    }
    assert told == defaults


def test_the_three_forms_say_the_same(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    loaded = []
    for language, suffix in (("", ".conf"), ("yaml", ".yaml"), ("toml", ".toml")):
        (block,) = blocks(text, language)
        path = tmp_path / f"job{suffix}"
        path.write_text(block)
        loaded.append(load(str(path)))
    assert loaded[0].cluster == Cluster(nworker_groups=2, max_delay=1)
    assert loaded[0] == loaded[1] == loaded[2]


def the_diff() -> tuple[str, str]:
    """README's script without Shoal and with it."""
    (block,) = blocks(README, "diff")
    lines = block.splitlines()
    return tuple("\n".join(line[1:] for line in lines if not line.startswith(side)) for side in "+-")  # type: ignore[return-value]


def test_the_diff_has_five_lines_and_turns_one_script_that_runs_into_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (block,) = blocks(README, "diff")
    assert sum(line.startswith("+") for line in block.splitlines()) == 5
    mine = ModuleType("mine")
    mine.dataset = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))  # type: ignore[attr-defined]
    mine.Net = lambda: torch.nn.Linear(4, 3)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    before, after = the_diff()
    plain: dict[str, object] = {}
    exec(before, plain)
    assert "loss" in plain and "shoal" not in plain

    def train(run: Run) -> int:
        script: dict[str, object] = {}
        exec(after, script)
        assert script["run"] is run
        return run.global_step

    assert set(run_cluster(train, "downpour").results.values()) == {5}


def test_the_evaluations_of_script_md_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "".join(blocks((ROOT / "docs" / "script.md").read_text(), "python"))
    assert "run.evaluate(test, data=testset" in code and "run.save_best(" in code
    monkeypatch.chdir(tmp_path)
    testset = TensorDataset(torch.randn(50, 4), torch.randint(3, (50,)))

    def train(run: Run) -> tuple[float, float]:
        model = torch.nn.Linear(4, 3)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        script: dict[str, Any] = {"run": run, "model": model, "torch": torch, "testset": testset}
        exec(code, script)
        with torch.no_grad():
            found = (model(testset.tensors[0]).argmax(1) == testset.tensors[1]).double().mean().item()
        return script["result"]["accuracy"], found

    for told, found in run_cluster(train, "sandblaster").results.values():
        assert told == pytest.approx(found)
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]
