"""`hpctrain bench`: measurements, one subcommand per file."""

from __future__ import annotations

import click

from hpctrain.cli.bench_data import data
from hpctrain.cli.bench_engine import engine
from hpctrain.cli.bench import scaling
from hpctrain.cli.failure import Commands


@click.group(cls=Commands)
def bench() -> None:
    """Measure how fast things are on this machine."""


bench.add_command(data)
bench.add_command(engine)
bench.add_command(scaling)
