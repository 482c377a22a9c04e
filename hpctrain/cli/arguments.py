"""Arguments that several commands take, and the words that a shell may complete them with. Imports nothing before it is asked."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

from hpctrain.paths import expanded


class FilePath(click.Path):
    """A path in which `~` and `$VARIABLE` are expanded, as in configurations: shells do not expand the `~` in --out=~/x."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = expanded(value)
            except ValueError as error:
                self.fail(f"{value} is no path: {error}.", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilePath):
    """A file to write, refused before any work is done if it cannot be written.

    Args:
        streams: whether pipes, terminals and other character devices are accepted as well as regular files.
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
        option: the option that names the file; empty if an argument names it.

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


class Seconds(click.FloatRange):
    """A finite time in seconds, with a lower bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return seconds


def keys(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The keys of configurations that begin so, each with its =; of a section that is not named yet, the section alone."""
    from hpctrain.config.faults import known_paths, section_at
    from hpctrain.core.yaml_source import dotted

    depth = incomplete.count(".") + 1
    paths = [path for path in known_paths() if len(path) == depth and dotted(path).startswith(incomplete)]
    return [f"{dotted(path)}{'=' if section_at(path) is None else '.'}" for path in paths]


def sites(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The sites whose names begin so."""
    from hpctrain.site import profile_files

    return [name for name in profile_files.paths() if name.startswith(incomplete)]


def examples(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The installed configurations and job scripts whose names begin so."""
    from hpctrain.config import examples

    return [name for name in examples.names() if name.startswith(incomplete)]


FILE = click.argument("file", type=FilePath(dir_okay=False, path_type=Path))
OVERRIDES = click.argument("overrides", nargs=-1, shell_complete=keys)
PASS_STYLE = click.option(
    "--progress",
    "style",
    type=click.Choice(["bar", "none"]),
    help="Show by a bar on stderr how many images are done, or not; by default a bar on a terminal.",
)
