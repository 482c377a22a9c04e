"""Arguments shared by several commands: paths, configurations with overrides, ranks that keep a log, and completion.

Every command reads its configuration with `load_config`, which reports an unknown name before the errors that follow from it.
Nothing heavy is imported at the top.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.core import log
from hpctrain.core import log as rank_log
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import expanded
from hpctrain.core.text import choices, counted, echo, nearest
from hpctrain.launch.launcher import Launcher, detect

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import KeyPath, Source
    from hpctrain.runs.directory import RunDirectory


class FilePath(click.Path):
    """Path whose `~` and `$VARIABLE` are expanded, as in configurations: shells do not expand the `~` in --out=~/x."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = expanded(value)
            except ValueError as error:
                self.fail(f"{value} is not a path: {error}.", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilePath):
    """File to write. A file that cannot be written is refused before the command starts its work.

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
    from hpctrain.core.errors import ConfigError
    from hpctrain.storage.atomic_write import check_target

    try:
        check_target(path, streams=streams)
    except OSError as error:
        named = f"{option} {path}".lstrip()
        raise ConfigError(f"{named} cannot be written: {error.strerror}; give another path.") from None


class OneOf(click.Choice):
    """A choice of words. The error for another word names the nearest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f'there is no "{value}"; {choices(str(value), self.choices)}.', param, ctx)


class Seconds(click.FloatRange):
    """Finite time in seconds, with a lower bound."""

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
PASS_STYLE = click.option(
    "--progress",
    "style",
    type=OneOf(["bar", "none"]),
    help="Show the progress as a bar on stderr, or not at all; default: a bar on a terminal, nothing elsewhere.",
)


#: default directory of runs
RUNS = Path("runs")


def newest_runs(
    count: int = 1, directory: Path = RUNS, *, trained: bool = False, prefers: Callable[[RunDirectory], bool] | None = None
) -> list[Path]:
    """Return the newest `count` runs in a directory, oldest first: the default of commands that read runs.

    Print the choice on stderr if there are runs of other names. Other arguments and errors are those of `directory.newest_runs`.

    Args:
        prefers: function that returns whether a run is preferred to newer ones; None: the newest runs are returned.
    """
    from hpctrain.runs import directory as run_directory

    newest = [run.path for run in run_directory.newest_runs(directory, count, trained=trained)]
    if prefers is not None:
        readable = (run.open() for run in run_directory.listed_runs(directory, None) if run.fault is None)
        newest = [next((run.path for run in readable if prefers(run)), newest[0])]
    if (note := run_directory.choice_note(directory, newest[-1])) and not detect(os.environ).rank:
        echo(note, err=True)
    return newest


def or_newest_trained(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of an argument; if it is missing, that of the newest run with a checkpoint (callback of click)."""
    return newest_runs(trained=True)[0] if path is None and not ctx.resilient_parsing else path


def load_config(file: Path, overrides: tuple[str, ...]) -> tuple[Config, Source]:
    """Return the configuration in a file with overrides, checked against its schema. Imports no NumPy unless there is a fault.

    Options of named objects are not checked here; see `check_names`.

    Raises:
        ConfigError: the configuration has faults; one sentence for each, with its position.
    """
    from hpctrain.config.load import load  # here: it loads pydantic and YAML, which `hpctrain --help` does not need

    return load(file, overrides, _refusal)


def _refusal(path: KeyPath, name: str) -> str | None:
    from hpctrain.config.checks import refusal

    return refusal(path, name)


ALL, NONE = "all", "none"
_SPANS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def log_ranks_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --log-ranks to a command; the argument is `log_ranks`."""
    return click.option(
        "--log-ranks",
        default=NONE,
        metavar="all|none|0,3,8-15",
        help="Ranks whose full log, with times, errors and stack traces, is written to logs/rank-NNNN.log in the run directory.",
    )(command)


def begin_log(text: str, launcher: Launcher) -> None:
    """Configure the log of this rank by the value of --log-ranks. Records are buffered until the log file exists.

    Raises:
        ConfigError: the value names no ranks, or a rank that the job does not have; the message has the nearest legal value.
    """
    rank, size = launcher.rank or 0, launcher.expected_size or 1
    if names_rank(text, size, rank):
        rank_log.begin_rank_log()
    log.configure(rank, size)
    log.leave_warnings_to_rank_0(rank)


def names_rank(text: str, size: int, rank: int) -> bool:
    """Return whether a list of ranks contains `rank`, in a job of `size` ranks.

    Raises:
        ConfigError: as for `begin_log`.
    """
    if text in (ALL, NONE):
        return text == ALL
    words = text.replace(" ", "")
    if not _SPANS.fullmatch(words):
        near = nearest(text, (ALL, NONE)) or ALL
        raise ConfigError(f"--log-ranks is {text!r}, but must be all, none, or ranks such as 0,3,8-15; the nearest is {near}.")
    is_named = False
    for span in words.split(","):
        first, _, end = span.partition("-")
        last = end or first
        if int(first) > int(last):
            raise ConfigError(
                f"--log-ranks has {span}, but the first rank of a range must not exceed the last; use {last}-{first}."
            )
        if int(last) >= size:
            raise ConfigError(
                f"--log-ranks names rank {int(last)}, but the job has {counted(size, 'rank')}; the largest number is {size - 1}."
            )
        is_named = is_named or int(first) <= rank <= int(last)
    return is_named
