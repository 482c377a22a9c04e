"""Arguments that several commands take, and the words that a shell may complete them with. Imports nothing before it is asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from hpctrain.paths import expanded


class FilePath(click.Path):
    """A path, in which `~` and `$VARIABLE` are filled in, as in paths of configurations: shells leave both in --out=~/x."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = expanded(value)
            except ValueError as error:
                self.fail(f"{value} is no path: {error}.", param, ctx)
        return super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A finite time in seconds, of at least a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return seconds


def keys(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The keys of configurations that begin so, each with its =; of a section that is not named yet, the section alone."""
    from hpctrain.config.faults import known_paths, section_at
    from hpctrain.config.source import dotted

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
