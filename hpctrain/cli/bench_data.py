"""`hpctrain bench data`: how fast a configuration's images become batches, and what limits that."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import FILE, OVERRIDES, OutputFile
from hpctrain.cli.bench import RankCounts
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from hpctrain.bench.data import DataRates

_COLUMNS = 80
_NAME, _NUMBER = 16, 12


class ThreadCounts(RankCounts):
    """Numbers of threads, as 1,2,4."""

    name = "threads"


@click.command()
@FILE
@OVERRIDES
@click.option(
    "--threads",
    type=ThreadCounts(),
    help="Numbers of threads that make a batch, such as 1,2,4; by default 1, 2, 4 and so on up to this machine's cores.",
)
@click.option("--no-step", is_flag=True, help="Time no training step to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--out", type=OutputFile(streams=True), help="File to which all figures are written as JSON.")
def data(
    file: Path, overrides: tuple[str, ...], threads: tuple[int, ...] | None, no_step: bool, as_json: bool, out: Path | None
) -> None:
    """Time the way of images to a batch.

    Prints images per second of each stage for several numbers of threads, and tells which stage limits FILE's training, with
    OVERRIDES, in one process and without MPI.
    """
    from hpctrain.cli.loading import load_config
    from hpctrain.launch.launcher import detect
    from hpctrain.launch.threads import set_threads

    config, source = load_config(file, overrides)
    plan = set_threads(detect(os.environ), None if config.threads == "auto" else config.threads)  # before NumPy is imported
    from hpctrain.bench.data import measure
    from hpctrain.bench.machine import machine
    from hpctrain.config.checks import check_names
    from hpctrain.storage.atomic_write import write_json

    check_names(config, source)
    counts = threads or tuple(1 << power for power in range(plan.cores.bit_length()))
    rates = measure(config, counts, plan.threads, times_step=not no_step)
    sentences = [rates.sentence(count) for count in rates.threads]
    content = {"config": str(file), **asdict(rates), "sentences": sentences, "machine": machine()}
    if as_json:
        echo_block(json.dumps(content, indent=1))
    else:
        for line in (*table(rates), *_folded(sentences)):
            echo(line)
    if out is not None:
        write_json(out, content)


def table(rates: DataRates) -> list[str]:
    """Images per second by stage; numbers of threads that find no room stand in a table of their own below."""
    from hpctrain.bench.data import READ

    height, width, channels = rates.shape
    lines = [f"images/s, in batches of {rates.images} images of {height} x {width} x {channels}"]
    at_once = (_COLUMNS - _NAME) // _NUMBER
    for begin in range(0, len(rates.threads), at_once):
        counts = rates.threads[begin : begin + at_once]
        lines.append("stage".ljust(_NAME) + "".join(_threads(count).rjust(_NUMBER) for count in counts))
        for stage in rates.names:
            name = "read, decode" if stage == READ and rates.decodes else stage
            lines.append(name.ljust(_NAME) + "".join(f"{rates.rate(stage, count):,.0f}".rjust(_NUMBER) for count in counts))
    return lines


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _folded(sentences: list[str]) -> list[str]:
    from hpctrain.train.progress_text import folded

    return [line for sentence in sentences for line in folded(sentence.split(", "), _COLUMNS, ", ")]
