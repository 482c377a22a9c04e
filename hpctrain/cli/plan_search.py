"""`hpctrain plan search`: the grid, plan and averager that cost least on a machine, by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import planner_options
from hpctrain.cli.arguments import FILE, OVERRIDES, OutputFile, Seconds
from hpctrain.cli.loading import load_config
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.experiment.planner_search import PlannedSearch


@click.command()
@FILE
@OVERRIDES
@planner_options.MACHINE
@click.option("--ranks", type=click.IntRange(min=1, max=1_000_000), required=True, help="Number of ranks of the job.")
@click.option("--best", type=click.IntRange(min=1), default=5, show_default=True, help="Number of choices to print.")
@click.option(
    "--write", type=OutputFile(streams=True), help="File for the configuration with the best choice, as `train` takes it."
)
@click.option(
    "--keep",
    type=click.Choice(["grid", "plan", "averager", "micro_batches"]),
    multiple=True,
    help="Section of the configuration that stays as it is; may be given several times.",
)
@click.option(
    "--measure", is_flag=True, help="Measure the operators of the best choices on this machine first, and search again."
)
@click.option(
    "--seconds",
    type=Seconds(min=1),
    default=60.0,
    show_default=True,
    help="Time after which --measure begins nothing more, in seconds.",
)
@planner_options.BANDWIDTH
@planner_options.LATENCY
@planner_options.COMPUTE
@planner_options.IMAGE
@planner_options.CLASSES
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, times in seconds and sizes in bytes.")
def search(
    file: Path,
    overrides: tuple[str, ...],
    machine: str,
    ranks: int,
    best: int,
    write: Path | None,
    keep: tuple[str, ...],
    measure: bool,
    seconds: float,
    bandwidth: float,
    latency: float,
    compute: float,
    image: tuple[int, int, int] | None,
    classes: int | None,
    as_json: bool,
) -> None:
    """Find the fastest way to run a training.

    Searches the grid, the use of each layer, the averager and the number of micro-batches with which a step of FILE's training,
    with OVERRIDES, takes least time on that many ranks of a machine, as far as memory allows; the best few are simulated.
    """
    if write is not None and write.exists() and file.exists() and write.samefile(file):
        raise ConfigError(f"--write {write} is the configuration itself, whose comments would be lost; give another name.")
    from hpctrain.config.checks import check_names

    config, source = load_config(file, overrides)
    check_names(config, source)
    from hpctrain.experiment import planner_search
    from hpctrain.planner import machine_file

    factors = {"bandwidth": bandwidth, "latency": latency, "compute": compute}
    task = planner_search.SearchTask(config, ranks, machine_file.read(machine), factors, keep, image, classes)
    outcome = planner_search.run(task)
    if measure:
        from hpctrain.experiment.planner_measurement import measure as measure_here

        coverage = measure_here(task, [choice.candidate for choice in outcome.result.choices[:best]], seconds)
        left = f"; {coverage.left} did not fit into the time or the memory" if coverage.left else ""
        echo(f"Measured {coverage.programs} programs in {coverage.seconds:.0f} s{left}.", err=True)
        outcome = planner_search.run(task)
    command = _written(config, outcome, file, overrides, write)
    from hpctrain.cli import search_tables

    if as_json:
        echo_block(json.dumps(search_tables.as_dict(outcome, best, command), indent=1))
    else:
        search_tables.print_search(outcome, best, command)


def _written(config: Config, outcome: PlannedSearch, file: Path, overrides: tuple[str, ...], write: Path | None) -> str:
    """The command line that trains with the best choice, from the file that is written for it, if any."""
    from hpctrain.experiment import candidate_keys
    from hpctrain.storage.atomic_write import write_text

    choice = outcome.result.best
    if write is None:
        words = (*overrides, *candidate_keys.overrides(choice.candidate))
        return candidate_keys.command_line(str(file), words, outcome.task.ranks)
    head = (
        f"{file} with the grid, plan and averager that hpctrain plan search chose for {outcome.task.ranks} ranks",
        f"of the machine {outcome.task.machine.name}: simulated, {choice.prediction.step.seconds:.4g} s per step.",
    )
    write_text(write, candidate_keys.written(config, choice.candidate, head))
    return candidate_keys.command_line(str(write), (), outcome.task.ranks)
