"""`hpctrain plan simulate`: how a training would scale on a machine, from one simulated step for each number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import planner_options
from hpctrain.cli.arguments import FILE, OVERRIDES, OutputFile
from hpctrain.cli.loading import load_config
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.config.schema import Config
    from hpctrain.planner.configured_search import SimulatedPoint, SimulatedStudy


@click.command()
@FILE
@OVERRIDES
@planner_options.MACHINE
@click.option(
    "--ranks",
    type=planner_options.RankSeries(),
    required=True,
    help="Numbers of ranks to simulate, such as 1,2,4 or 1,2,...,8192 (each twice the one before).",
)
@click.option(
    "--mode",
    type=click.Choice(["weak", "strong"]),
    default="weak",
    show_default=True,
    help="Meaning of the configured batch: each rank's own (weak), or shared by all ranks (strong).",
)
@click.option(
    "--averager",
    "averagers",
    multiple=True,
    metavar="NAME",
    help="Averager to simulate instead of the configured one, a name or {name: ..., options}; may be given several times.",
)
@planner_options.BANDWIDTH
@planner_options.LATENCY
@planner_options.COMPUTE
@click.option(
    "--slow",
    type=planner_options.SlowRank(),
    multiple=True,
    help="Rank that computes so many times longer than others, as 3=1.5.",
)
@click.option(
    "--jitter",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    help="Share by which the times of operators deviate at random.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random deviations.")
@planner_options.IMAGE
@planner_options.CLASSES
@click.option("--png", type=OutputFile(), help="File to which the curves are drawn; needs matplotlib (the extra `export`).")
@click.option("--trace", type=OutputFile(), help="File for the trace of the step of the largest job, as runs write traces.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, times in seconds and sizes in bytes.")
def simulate(
    file: Path,
    overrides: tuple[str, ...],
    machine: str,
    ranks: tuple[int, ...],
    mode: Any,
    averagers: tuple[str, ...],
    bandwidth: float,
    latency: float,
    compute: float,
    slow: tuple[tuple[int, float], ...],
    jitter: float,
    seed: int,
    image: tuple[int, int, int] | None,
    classes: int | None,
    png: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate how a training scales on a machine.

    Simulates a step of FILE's training, with OVERRIDES, on each number of ranks: its time, the exposed time of it, efficiency
    and memory. The machine need not be there, nor the data.
    """
    configs = _configs(file, overrides, averagers)
    from hpctrain.planner import configured_search
    from hpctrain.experiment.planner_search import progress_of
    from hpctrain.planner import machine_file
    from hpctrain.planner.prediction import SimulationOptions

    slow_factors = planner_options.slow_ranks(slow, ranks[-1])
    progress = progress_of(next(iter(configs.values())))
    study = configured_search.SimulatedStudy(
        configs=configs,
        ranks=ranks,
        mode=mode,
        machine=machine_file.read(machine),
        factors={"bandwidth": bandwidth, "latency": latency, "compute": compute},
        options=SimulationOptions(progress=progress, slow=slow_factors, jitter=jitter, seed=seed),
        image=image,
        classes=classes,
    )
    points = configured_search.run(study)
    _print(study, points, as_json=as_json)
    if trace is not None:
        echo(configured_search.write_trace(trace, points[len(ranks) - 1], study.title), err=as_json)
    if png is not None:
        drawn = configured_search.plot(png, points, study.title)
        echo(drawn or f"{png} is not drawn: matplotlib is not installed (extra `export`).", err=as_json or not drawn)


def _configs(file: Path, overrides: tuple[str, ...], averagers: tuple[str, ...]) -> dict[str, Config]:
    """The configuration with each averager, by its label."""
    from hpctrain.config.checks import check_names

    configs = {}
    for averager in averagers or ("",):
        config, source = load_config(file, (*overrides, *([f"averager={averager}"] if averager else [])))
        check_names(config, source)
        configs[averager or config.averager.name] = config
    return configs


def _print(study: SimulatedStudy, points: Sequence[SimulatedPoint], *, as_json: bool) -> None:
    from hpctrain.cli import simulation_tables
    from hpctrain.planner import configured_search

    if as_json:
        echo_block(json.dumps(configured_search.facts(study, points), indent=1))
    else:
        simulation_tables.print_scaling(study, points)
