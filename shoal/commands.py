"""What the command line can do: ``shoal run``, ``shoal validate``, ``shoal doctor``, ``shoal secret``.

Nothing here imports torch, so that a mistake is told at once.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shoal import __version__, topology
from shoal.config import Config, load
from shoal.config.schema import CLASS
from shoal.errors import ConfigError, Mistake
from shoal.launcher import CONFIGURATION, environment
from shoal.launcher.process import ForkProcess
from shoal.rundir import RunDir, fresh, taken
from shoal.schedule import Schedules, misfits

app = typer.Typer(
    help="Trains PyTorch models on groups of workers and parameter servers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any field by its dotted name; may be given again."),
]
Optimizers = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:CLASS", help="A class that servers may run besides torch.optim's."),
]
# What follows the script is the script's.
PASSING = {"allow_extra_args": True, "ignore_unknown_options": True}


def main(process: ForkProcess | None) -> None:
    """Do what the command line says.

    Args:
        process: to fork a run's members, where this may be a run that starts some.
    """
    try:
        app(obj=process)
    except ConfigError as error:
        if (place := environment.job()) is not None:
            from shoal.launcher import torchrun

            torchrun.refuse(place, error)
        typer.echo(str(error), err=True)
        raise SystemExit(CONFIGURATION) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Trains PyTorch models on groups of workers and parameter servers."""


@app.command(context_settings={**PASSING, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script; what follows it is the script's.")],
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A preset, or a file with a cluster block.")
    ],
    settings: Settings = None,
    run_dir: Annotated[Path | None, typer.Option(help="The run's directory; must not exist.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same as --set seed=N.")] = None,
    allow_optimizer: Optimizers = None,
    record_schedule: Annotated[
        Path | None, typer.Option(help="Write the order of messages on the servers to a new folder.")
    ] = None,
    replay_schedule: Annotated[
        Path | None, typer.Option(help="Keep to the order in this folder: the run is repeated bit for bit.")
    ] = None,
) -> None:
    """Trains a script on this machine; started by torchrun, it is one process of those that train it."""
    overrides = [*(settings or ()), *([f"seed={seed}"] if seed is not None else ())]
    place = environment.job()
    new = None if place else run_dir  # torchrun's ranks find it made by the first, or by an attempt before
    config = _checked(cluster, overrides, script, new, allow_optimizer or [])
    if place is not None:
        if record_schedule or replay_schedule:
            expected = "has its order kept by `shoal run` alone, not by torchrun"
            raise ConfigError([Mistake("schedule", str(record_schedule or replay_schedule), expected)])
        from shoal.launcher import torchrun

        torchrun.run(place, config, script, context.args, run_dir)
    schedules = _schedules(config, record_schedule, replay_schedule)
    from shoal.launcher.local import Job, launch

    directory = RunDir.create(run_dir or fresh(config.cluster.workspace))
    raise typer.Exit(launch(Job(config, script, tuple(context.args), directory, schedules), context.obj))


@app.command(context_settings=PASSING)
def validate(
    context: typer.Context,
    conf: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A preset, or a file.")],
    script: Annotated[
        str | None,
        typer.Argument(help="A training script; what follows it is the script's (-- before it: all of it)."),
    ] = None,
    settings: Settings = None,
    allow_optimizer: Optimizers = None,
) -> None:
    """Says what a configuration amounts to: framework, processes, who talks to whom.

    With a script, which is run up to its prepare(): who owns how many bytes, and the memory that each member
    needs.
    """
    config = _checked(conf, list(settings or ()), script, None, allow_optimizer or [])
    typer.echo(topology.describe(topology.Topology.of(config.cluster)))
    if script is not None:
        typer.echo()
        _look("budget", config.model_dump_json(), script, *context.args)


@app.command(context_settings={**PASSING, "allow_interspersed_args": False})
def doctor(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script; what follows it is the script's.")],
) -> None:
    """Runs a script for three steps, alone, and says what will surprise under a cluster."""
    if not Path(script).is_file():
        raise ConfigError([_no_script(script)])
    _look("doctor", script, *context.args)


@app.command()
def secret(
    path: Annotated[Path | None, typer.Argument(metavar="FILE", help="Where to; must not exist.")] = None,
) -> None:
    """Makes the secret that locks the wires between machines; every machine needs a copy of it."""
    path = path or environment.secret_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        expected = f"must be a new file that can be written ({error.strerror})"
        raise ConfigError([Mistake("FILE", str(path), expected)]) from None
    typer.echo(f"{path}: copy it to every machine, where nobody else can read it")


def _look(module: str, *arguments: str) -> NoReturn:
    """Run a script to be looked at, in the place of this process, so that no child can outlive it."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"shoal.{module}", *arguments])


def _no_script(script: str) -> Mistake:
    return Mistake("script", script, "must be a Python file")


def _checked(
    cluster: str, overrides: list[str], script: str | None, run_dir: Path | None, optimizers: list[str]
) -> Config:
    """The configuration of a run, after all that can be wrong before it starts has been looked at."""
    mistakes: list[Mistake] = []
    config = None
    try:
        config = load(cluster, overrides)
    except ConfigError as error:
        mistakes += error.mistakes
    if script is not None and not Path(script).is_file():
        mistakes.append(_no_script(script))
    if run_dir and run_dir.exists():
        mistakes.append(taken(run_dir))
    for name in optimizers:
        if not re.fullmatch(CLASS, name):
            mistakes.append(Mistake("--allow-optimizer", name, "must be MODULE:CLASS"))
    if config is None or mistakes:
        raise ConfigError(mistakes)
    return config.model_copy(update={"allow_optimizers": (*config.allow_optimizers, *optimizers)})


def _schedules(config: Config, record: Path | None, replay: Path | None) -> Schedules:
    """Where schedules go to and come from; raises ConfigError for one that cannot fit this run."""
    folders = [str(path.resolve()) if path is not None else None for path in (record, replay)]
    schedules = Schedules(*folders)
    found = list(misfits(schedules, config, topology.Topology.of(config.cluster).servers))
    if record is not None and not found:
        try:
            record.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected = f"must be a folder that can be made ({error.strerror})"
            found = [Mistake("--record-schedule", str(record), expected)]
    if found:
        raise ConfigError(found)
    return schedules
