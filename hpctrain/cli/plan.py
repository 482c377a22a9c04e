"""`hpctrain plan`: describe a configuration on a grid of ranks without running it. It reads only the header of the data.

`search` finds the fastest grid, plan and averager on a machine by simulation. `simulate` shows how a training scales on a
machine, from one simulated step for each number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import AUTO, FILE, MODE, OVERRIDES, Commands, FilePath, Finite, OutputFile, options, with_auto
from hpctrain.cli.bench import RankCounts
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import counted, echo, echo_block

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.planner.planned_run import PlannedRun
    from hpctrain.planner.search.configured_search import PlannedSearch


FACTOR = Finite(min=0, min_open=True)


class SlowRank(click.ParamType):
    """Parameter type for a rank and the factor on its compute time, such as 3=1.5."""

    name = "rank=factor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        rank, _, factor = str(value).partition("=")
        if not rank.strip().isdecimal():
            self.fail(f"{value!r} must be a rank and a factor, such as 3=1.5", param, ctx)
        return int(rank), FACTOR.convert(factor, param, ctx)


MACHINE = click.option(
    "--machine",
    type=FilePath(),
    required=True,
    metavar="FILE|NAME",
    help="Machine model to plan for: a file written by `hpctrain calibrate`, or the name of an installed one.",
)
_WHAT_IF = options(
    click.option("--bandwidth", type=FACTOR, default=1.0, help="What-if factor on the bandwidth of the machine's links."),
    click.option("--latency", type=FACTOR, default=1.0, help="What-if factor on the latency of the machine's links."),
    click.option("--compute", type=FACTOR, default=1.0, help="What-if factor on the compute speed of the ranks."),
)
IMAGE = click.option(
    "--image",
    nargs=3,
    type=click.IntRange(min=1),
    metavar="H W C",
    help="Size of the input images; default: that of the training file after augmentation, or the model's default if there is no "
    "file.",
)
CLASSES = click.option(
    "--classes",
    type=click.IntRange(min=1),
    help="Number of classes; default: that of the training file, or the model's default if there is no file.",
)


def slow_ranks(pairs: tuple[tuple[int, float], ...], most_ranks: int) -> Mapping[int, float]:
    """Return the factors of --slow by rank.

    Raises:
        ConfigError: the largest simulated job does not have one of the ranks.
    """
    for rank, _ in pairs:
        if rank >= most_ranks:
            raise ConfigError(
                f"--slow names rank {rank}, but the largest job has {counted(most_ranks, 'rank')}; the highest rank is "
                f"{most_ranks - 1}."
            )
    return dict(pairs)


@click.command()
@FILE
@OVERRIDES
@MACHINE
@click.option(
    "--ranks",
    type=click.IntRange(min=1, max=1_000_000),
    required=True,
    help="Number of ranks of the job. If numbers of ranks per node are compared, it determines the nodes, and the best choice "
    "may have another number of ranks.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="Number of ranks per node; default: compare the machine's number with others on the same nodes if the machine's file "
    "has single_thread_rates, otherwise the machine's number.",
)
@click.option("--best", type=click.IntRange(min=1), default=5, show_default=True, help="Number of choices to print.")
@click.option(
    "--write", type=OutputFile(streams=True), help="File to which the configuration with the best choice is written, for `train`."
)
@click.option(
    "--keep",
    type=click.Choice(["grid", "plan", "averager", "micro_batches"]),
    multiple=True,
    help="Section of the configuration that the search must not change; may be given several times.",
)
@click.option("--measure", is_flag=True, help="Measure the operators of the best choices on this machine, and repeat the search.")
@click.option(
    "--seconds",
    type=Finite(min=1),
    default=60.0,
    show_default=True,
    help="Time budget of --measure in seconds; no measurement starts after it.",
)
@_WHAT_IF
@IMAGE
@CLASSES
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, times in seconds and sizes in bytes.")
def search(
    file: Path,
    overrides: tuple[str, ...],
    machine: str,
    ranks: int,
    ranks_per_node: int | None,
    best: int,
    write: Path | None,
    keep: tuple[str, ...],
    measure: bool,
    seconds: float,
    image: tuple[int, int, int] | None,
    classes: int | None,
    as_json: bool,
    **factors: float,
) -> None:
    """Find the fastest way to run a training.

    The command searches for the grid, the use of each layer (batch, model or domain), the averager and the number of
    micro-batches that minimise the step time of FILE's training with OVERRIDES. The training runs on the given number of ranks of
    a machine and must fit its memory. The best few choices are simulated. If the file of the machine has single_thread_rates, the
    search also compares numbers of ranks per node, and of threads per rank, on the same nodes and cores.
    """
    if write is not None and write.exists() and file.exists() and write.samefile(file):
        raise ConfigError(f"--write {write} would overwrite the configuration and lose its comments; give another file name.")
    from hpctrain.assembly.faults import load_checked

    config = load_checked(file, overrides)
    from hpctrain.planner.costs import machine_file
    from hpctrain.planner.search import configured_search

    task = configured_search.SearchTask(config, ranks, machine_file.read(machine), factors, keep, image, classes)
    outcome = configured_search.search_layouts(task, ranks_per_node)
    if measure:
        _measure(outcome, best, seconds)
        outcome = configured_search.search_layouts(task, ranks_per_node)
    command = _written(outcome, file, overrides, write)
    from hpctrain.cli import simulation_tables

    if as_json:
        echo_block(json.dumps(simulation_tables.search_dict(outcome, best, command), indent=1))
    else:
        simulation_tables.print_search(outcome, best, command)


def _measure(outcome: PlannedSearch, best: int, seconds: float) -> None:
    """Measure the operators of the best choices for each number of ranks per node, in equal shares of the time budget."""
    from hpctrain.planner.measure.measurement import measure

    searches = [(f" for {one}", one.outcome) for one in outcome.layouts if one.outcome is not None] or [("", outcome)]
    for layout, planned in searches:
        candidates = [choice.candidate for choice in planned.result.choices[:best]]
        coverage = measure(planned.task, candidates, seconds / len(searches))
        left = len(candidates) - len(coverage.covered)
        end = f"; {left} choices did not fit into the time or the memory" if left else ""
        echo(f"Measured {coverage.programs} programs{layout}{end}.", err=True)


def _written(outcome: PlannedSearch, file: Path, overrides: tuple[str, ...], write: Path | None) -> str:
    """Return the command line that trains with the best choice; write its configuration first if there is a file to write."""
    from hpctrain.planner.search import configured_search
    from hpctrain.storage.atomic_write import write_text

    task, choice = outcome.task, outcome.result.best
    if write is None:
        words = (*overrides, *configured_search.overrides(choice.candidate, configured_search.configured_threads(task.config)))
        return configured_search.command_line(str(file), words, task.ranks)
    head = (
        f"{file} with the grid, plan and averager that hpctrain plan search chose for {task.ranks} ranks",
        f"of the machine {task.machine.name}, {min(task.ranks, task.machine.ranks_per_node)} on each node: simulated, "
        f"{choice.prediction.step.seconds:.4g} s per step.",
    )
    write_text(write, configured_search.written(task.config, choice.candidate, head))
    return configured_search.command_line(str(write), (), task.ranks)


@click.command()
@FILE
@OVERRIDES
@MACHINE
@click.option(
    "--ranks",
    type=RankCounts(),
    required=True,
    help="Numbers of ranks to simulate, such as 1,2,4.",
)
@MODE
@click.option(
    "--averager",
    "averagers",
    multiple=True,
    metavar="NAME",
    help="Averager to simulate instead of the configured one: a name or {name: ..., options}; may be given several times.",
)
@_WHAT_IF
@click.option(
    "--slow",
    type=SlowRank(),
    multiple=True,
    help="Slow rank and the factor on its compute time, such as 3=1.5; may be given several times.",
)
@IMAGE
@CLASSES
@click.option("--trace", type=OutputFile(), help="File for the trace of a step of the largest job, in the trace format of runs.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, times in seconds and sizes in bytes.")
def simulate(
    file: Path,
    overrides: tuple[str, ...],
    machine: str,
    ranks: tuple[int, ...],
    mode: Any,
    averagers: tuple[str, ...],
    slow: tuple[tuple[int, float], ...],
    image: tuple[int, int, int] | None,
    classes: int | None,
    trace: Path | None,
    as_json: bool,
    **factors: float,
) -> None:
    """Simulate how a training scales on a machine.

    The command simulates a step of FILE's training with OVERRIDES for each number of ranks, and prints its time, exposed
    communication, efficiency and memory. Neither the machine nor the data is needed.
    """
    configs = _configs(file, overrides, averagers)
    from hpctrain.comm.progress import ProgressMode
    from hpctrain.planner.costs import machine_file
    from hpctrain.planner.search import configured_search
    from hpctrain.planner.simulation.tasks import SimulationOptions

    slow_factors = slow_ranks(slow, ranks[-1])
    config = next(iter(configs.values()))
    study = configured_search.SimulatedStudy(
        configs=configs,
        ranks=ranks,
        mode=mode,
        machine=machine_file.read(machine).with_threads(configured_search.configured_threads(config)),
        factors=factors,
        options=SimulationOptions(progress=ProgressMode(config.progress), slow=slow_factors),
        image=image,
        classes=classes,
    )
    points = configured_search.run(study)
    if as_json:
        echo_block(json.dumps(configured_search.facts(study, points), indent=1))
    else:
        from hpctrain.cli import simulation_tables

        simulation_tables.print_scaling(study, points)
    if trace is not None:
        echo(configured_search.write_trace(trace, points[len(ranks) - 1], study.title), err=as_json)


def _configs(file: Path, overrides: tuple[str, ...], averagers: tuple[str, ...]) -> dict[str, Config]:
    """Return the configuration with each averager, by the averager's label."""
    from hpctrain.assembly.faults import load_checked

    configs = {}
    for averager in averagers or ("",):
        config = load_checked(file, (*overrides, *([f"averager={averager}"] if averager else [])))
        configs[averager or config.averager.name] = config
    return configs


_JOB_AND_LINK = options(
    FILE,
    OVERRIDES,
    AUTO,
    click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks of the job; default: that of the configured grid."),
    IMAGE,
    CLASSES,
    click.option(
        "--alpha",
        "alpha_seconds",
        type=Finite(min=0),
        default=20e-6,
        show_default=True,
        help="Assumed latency of a message, in seconds; a run measures it.",
    ),
    click.option(
        "--beta",
        "beta_seconds_per_byte",
        type=Finite(min=0),
        default=0.8e-9,
        show_default=True,
        help="Assumed time per byte, in seconds (the default is a link of 10 Gb/s); a run measures it.",
    ),
    click.option(
        "--ranks-per-node", type=click.IntRange(min=1), help="Number of ranks per node; default: all ranks are on one node."
    ),
    click.option(
        "--machine",
        type=FilePath(),
        metavar="FILE|NAME",
        help="Machine for choices that are `auto`: a file written by `hpctrain calibrate`, or the name of an installed machine.",
    ),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print everything as JSON, with sizes as integers. Equal ranks are listed once, as in 0-7 or 0-8184:8 (every 8th).",
    ),
)


@click.group(cls=Commands)
def plan() -> None:
    """Show, simulate and search how ranks run a training."""


plan.add_command(search)
plan.add_command(simulate)


@plan.command()
@_JOB_AND_LINK
def show(
    file: Path,
    overrides: tuple[str, ...],
    auto: bool,
    ranks: int | None,
    image: tuple[int, int, int] | None,
    classes: int | None,
    alpha_seconds: float,
    beta_seconds_per_byte: float,
    ranks_per_node: int | None,
    machine: str | None,
    as_json: bool,
) -> None:
    """Show what each rank owns, sends and stores, layer by layer.

    The command prints owners, halos, bytes sent and memory of each layer of FILE's model, then the averaging of gradients and the
    map of ranks. OVERRIDES such as grid.rows=2 override keys of the file.
    """
    task = _task(file, overrides, auto, ranks, image, classes, machine)
    from hpctrain.cli import plan_tables
    from hpctrain.comm.link import LinkModel
    from hpctrain.planner import planned_run
    from hpctrain.planner.program.group_schedules import group_schedules

    groups = planned_run.equal_split_groups(task)
    report = planned_run.description(task, [of_class[0] for of_class in groups])
    averaged = group_schedules(task.job, task.candidate, LinkModel(alpha_seconds, beta_seconds_per_byte), ranks_per_node)
    if as_json:
        content = plan_tables.as_dict(task, report, groups, averaged, ranks_per_node)
        echo_block(json.dumps(content, indent=1))
        return
    plan_tables.print_plan(task, report, averaged, ranks_per_node)


@plan.command()
@_JOB_AND_LINK
def schedule(alpha_seconds: float, beta_seconds_per_byte: float, ranks_per_node: int | None, as_json: bool, **job: Any) -> None:
    """Show the averager's schedule for the first steps.

    The command prints slices, owners, order, window and hash for each group of parameters. A run measures alpha and beta, and
    reorders some operations by measured times, but keeps the slices. Its directory contains the final schedule.
    """
    task = _task(**job)
    from hpctrain.cli import plan_tables
    from hpctrain.comm.link import LinkModel
    from hpctrain.planner.program.group_schedules import group_schedules

    link = LinkModel(alpha_seconds, beta_seconds_per_byte)
    averaged = group_schedules(task.job, task.candidate, link, ranks_per_node)
    if as_json:
        if task.assumption:
            echo(task.assumption, err=True)
        echo_block(json.dumps([plan_tables.schedule_dict(group) for group in averaged], indent=1))
        return
    for line in plan_tables.schedule_lines(task, averaged, link):
        echo(line)


def _task(
    file: Path,
    overrides: tuple[str, ...],
    auto: bool,
    ranks: int | None,
    image: tuple[int, int, int] | None,
    classes: int | None,
    machine: str | None,
) -> PlannedRun:
    from hpctrain.assembly.faults import load_checked
    from hpctrain.planner.planned_run import prepare

    config = load_checked(file, with_auto(overrides, auto=auto))
    if config.automatic:
        from hpctrain.planner.search.configured_search import resolved

        config, line = resolved(config, ranks, machine, image, classes)
        echo(line, err=True)
    elif machine is not None:
        from hpctrain.planner.costs import machine_file

        machine_file.read(machine)  # a wrong name is an error, even if nothing is automatic
    return prepare(config, ranks, image, classes)
