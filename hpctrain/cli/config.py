"""`hpctrain config`: show, check and describe configuration files. Needs no MPI and no data."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpctrain.cli.failure import Commands
from hpctrain.cli.loading import load_config

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_OVERRIDES = click.argument("overrides", nargs=-1)


@click.group(cls=Commands)
def config() -> None:
    """Show, check and describe configuration files."""


@config.command()
@_FILE
@_OVERRIDES
def show(file: Path, overrides: tuple[str, ...]) -> None:
    """Print FILE with OVERRIDES such as optimizer.lr=0.2 and all defaults, as YAML."""
    from hpctrain.config.dump import dump

    loaded, _ = load_config(file, overrides)
    click.echo(dump(loaded), nl=False)


@config.command()
@_FILE
@_OVERRIDES
def check(file: Path, overrides: tuple[str, ...]) -> None:
    """Check FILE with OVERRIDES: keys, types, ranges, names and their options. Exit 2 and one line per fault."""
    from hpctrain.experiment.check import check_names

    loaded, source = load_config(file, overrides)
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
