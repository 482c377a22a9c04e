"""Groups and arguments of commands: paths, overrides and completion. This module imports nothing heavy at the top."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.core.errors import ConfigError
from hpctrain.core.files import expanded
from hpctrain.launch import process_end
from hpctrain.process.ends import INTERRUPTED, ReportedExit, say, user_errors_end_in_sentences
from hpctrain.process.start import NO_RANK

if TYPE_CHECKING:
    from hpctrain.runs.directory import RunDirectory


_Command = TypeVar("_Command", bound=Callable[..., Any])


class FilePath(click.Path):
    """Parameter type for a path in which `~` and `$VARIABLE` are expanded, because shells do not expand the `~` in --out=~/x."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            if value.startswith("--"):  # click takes the next option for the value of an option
                self.fail(f"{value} is an option, but must be a path.", param, ctx)
            try:
                value = expanded(value)
            except ValueError as error:
                self.fail(f"{value} cannot be expanded: {error}.", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilePath):
    """Parameter type for a file to write. The command fails before it starts its work if the file cannot be written.

    Args:
        streams: whether pipes, terminals and other character devices are accepted next to regular files.
        makes_directory: whether a missing directory of the file is created.
        of_job: whether rank 0 of a job writes the file. Its directory need exist on that rank's node only, so the job checks it.
    """

    def __init__(self, *, streams: bool = False, makes_directory: bool = False, of_job: bool = False) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self.streams, self._makes_directory, self._of_job = streams, makes_directory, of_job

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if self._of_job:
            return path
        if not (self._makes_directory and not os.path.lexists(path.parent)):
            check_output(path, param.opts[0] if isinstance(param, click.Option) else "", streams=self.streams)
        return path


def check_output(path: Path, option: str = "", *, streams: bool = False) -> None:
    """Raise unless a file can be written; see `OutputFile`.

    Args:
        option: option that names the file; empty if an argument names it.

    Raises:
        ConfigError: the file cannot be written; the message has the option, the path and the reason.
    """
    from hpctrain.storage.atomic_write import check_target

    try:
        check_target(path, streams=streams)
    except OSError as error:
        named = f"{option} {path}".lstrip()
        raise ConfigError(f"{named} cannot be written: {error.strerror}; give another path.") from None


class Finite(click.FloatRange):
    """Parameter type for a finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return seconds


def keys(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the completions of a key: complete keys followed by "=", and sections followed by "."."""
    from hpctrain.config.load import known_paths, section_at
    from hpctrain.core.yaml_source import dotted

    depth = incomplete.count(".") + 1
    paths = [path for path in known_paths() if len(path) == depth and dotted(path).startswith(incomplete)]
    return [f"{dotted(path)}{'=' if section_at(path) is None else '.'}" for path in paths]


def complete_sites(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the sites whose names begin with the incomplete word."""
    from hpctrain.site import profile

    return [name for name in profile.profile_paths() if name.startswith(incomplete)]


def examples(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the installed configurations and job scripts whose names begin with the incomplete word."""
    from hpctrain.config import examples

    return [name for name in examples.names() if name.startswith(incomplete)]


FILE = click.argument("file", type=FilePath(path_type=Path))
OVERRIDES = click.argument("overrides", nargs=-1, shell_complete=keys)
AUTO = click.option(
    "--auto",
    is_flag=True,
    help="Choose grid, plan and averager for the shortest predicted step, as grid=auto plan=auto averager=auto do; a section of "
    "which OVERRIDES set a key is not chosen.",
)
MODE = click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="Meaning of the configured batch size: per rank (weak), or over all ranks (strong).",
)


def with_auto(overrides: tuple[str, ...], *, auto: bool) -> tuple[str, ...]:
    """Return the overrides, and those that --auto adds: auto for each open section of which the overrides set no key."""
    from hpctrain.config.values import OPEN_SECTIONS

    given = {override.partition("=")[0].partition(".")[0] for override in overrides}
    return (*overrides, *(f"{section}=auto" for section in OPEN_SECTIONS if auto and section not in given))


def options(*added: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds arguments and options to a command, which its help lists in this order."""
    return lambda command: functools.reduce(lambda decorated, add: add(decorated), reversed(added), command)


PASS_STYLE = click.option(
    "--progress",
    "style",
    type=click.Choice(["bar", "none"]),
    help="Show the progress as a bar on stderr, or not at all; default: a bar on a terminal, nothing elsewhere.",
)


#: default directory of runs
RUNS = Path("runs")


def newest_runs(
    count: int = 1, directory: Path = RUNS, *, trained: bool = False, prefers: Callable[[RunDirectory], bool] | None = None
) -> list[Path]:
    """Return the newest `count` runs in a directory, oldest first: the default of commands that read runs.

    Other arguments and errors are those of `directory.newest_runs`.

    Args:
        prefers: function that returns whether a run is preferred to newer ones; None: the newest runs are returned.
    """
    from hpctrain.runs import directory as run_directory

    newest = [run.path for run in run_directory.newest_runs(directory, count, trained=trained)]
    if prefers is not None:
        readable = (run.open() for run in run_directory.listed_runs(directory, None) if run.fault is None)
        newest = [next((run.path for run in readable if prefers(run)), newest[0])]
    return newest


def or_newest_trained(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of an argument; if it is missing, that of the newest run with a checkpoint (callback of click)."""
    return newest_runs(trained=True)[0] if path is None and not ctx.resilient_parsing else path


def log_ranks_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --log-ranks to a command; the argument is `log_ranks`."""
    return click.option(
        "--log-ranks",
        default=NO_RANK,
        metavar="all|none|0,3,8-15",
        help="Ranks whose full log, with times, errors and stack traces, is written to logs/rank-NNNN.log in the run directory.",
    )(command)


class Commands(click.Group):
    """Group of commands. An error that the user can fix ends the command with sentences on standard error and exit code 2."""

    group_class = type  # subgroups have the same class

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command line, and flush standard output, so that a failed write ends the command as any other error."""
        with user_errors_end_in_sentences():
            try:
                return super().main(*arguments, **options)
            finally:
                sys.stdout.flush()

    def invoke(self, ctx: click.Context) -> Any:
        with user_errors_end_in_sentences():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                say(INTERRUPTED, None)
                raise ReportedExit(process_end.SIGNALLED + signal.SIGINT) from None
