"""`hpctrain config`: show, check and describe configuration files. Needs no MPI and no data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from hpctrain.cli.failure import USER_ERROR
from hpctrain.errors import HpctrainError

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_OVERRIDES = click.argument("overrides", nargs=-1)


@click.group()
def config() -> None:
    """Show, check and describe configuration files."""


@config.command()
@_FILE
@_OVERRIDES
def show(file: Path, overrides: tuple[str, ...]) -> None:
    """Print FILE with OVERRIDES such as optimizer.lr=0.2 and all defaults, as YAML."""
    from hpctrain.config.dump import dump
    from hpctrain.config.load import load

    with _sentences():
        loaded, _ = load(file, overrides)
        click.echo(dump(loaded), nl=False)


@config.command()
@_FILE
@_OVERRIDES
def check(file: Path, overrides: tuple[str, ...]) -> None:
    """Check FILE with OVERRIDES: keys, types, ranges, names and their options. Exit 2 and one line per fault."""
    from hpctrain.config.load import load
    from hpctrain.experiment.check import check_names

    with _sentences():
        loaded, source = load(file, overrides)
        check_names(loaded, source)
        click.echo(
            f"ok: {file}: {loaded.model.name}, {loaded.epochs} epochs in batches of {loaded.batch}, {loaded.optimizer.name} with "
            f"lr {loaded.optimizer.lr:g}, schedule {loaded.schedule.name}"
        )


@config.command()
def schema() -> None:
    """Print the JSON schema of a configuration file."""
    from hpctrain.config.dump import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


@contextmanager
def _sentences() -> Iterator[None]:
    """End with the sentences of a user's error on stderr and exit code 2."""
    try:
        yield
    except HpctrainError as error:
        click.echo(str(error), err=True)
        raise SystemExit(USER_ERROR) from None
