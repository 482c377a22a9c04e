"""`hpctrain plan`: what a configuration means on a grid of ranks, before it runs. Needs no MPI, and only the data's header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import FILE, OVERRIDES, FilePath, Seconds
from hpctrain.cli.failure import Commands
from hpctrain.cli.loading import load_config
from hpctrain.cli.plan_search import search
from hpctrain.cli.plan_simulate import simulate
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from hpctrain.comm.link import LinkModel
    from hpctrain.experiment.planned_run import PlannedRun


_RANKS = click.option(
    "--ranks", type=click.IntRange(min=1), help="Number of ranks of the job; by default that of the configured grid."
)
_IMAGE = click.option(
    "--image",
    nargs=3,
    type=click.IntRange(min=1),
    metavar="H W C",
    help="Size of the images as the network sees them; by default that of the training file's, augmented, or the model's own "
    "where there is no such file.",
)
_CLASSES = click.option(
    "--classes",
    type=click.IntRange(min=1),
    help="Number of classes; by default that of the training file, or the model's own where there is no such file.",
)
_PER_NODE = click.option(
    "--ranks-per-node", type=click.IntRange(min=1), help="Number of ranks on each node; by default all ranks are on one."
)
_MACHINE = click.option(
    "--machine",
    type=FilePath(),
    metavar="FILE|NAME",
    help="Machine that auto chooses for: a file that `hpctrain calibrate` wrote, or the name of one that is installed.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with sizes as integers.")
_ALPHA = click.option(
    "--alpha",
    "alpha_seconds",
    type=Seconds(min=0),
    default=20e-6,
    show_default=True,
    help="Time that an empty message takes, in seconds; a run measures it, and orders operations by it.",
)
_BETA = click.option(
    "--beta",
    "beta_seconds_per_byte",
    type=Seconds(min=0),
    default=0.8e-9,
    show_default=True,
    help="Time that a byte takes, in seconds (the default is a link of 10 Gb/s); a run measures it.",
)


class PlanGroup(Commands):
    """`plan --schedule FILE` is `plan schedule FILE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--schedule" in args:
            args = ["schedule", *(arg for arg in args if arg != "--schedule")]
        return super().parse_args(ctx, args)


@click.group(cls=PlanGroup)
def plan() -> None:
    """Show what a grid of ranks does.

    Shows what a configuration means on a grid of ranks, before it runs.

    The command `plan --schedule FILE` is short for `plan schedule FILE`.
    """


plan.add_command(search)
plan.add_command(simulate)


@plan.command()
@FILE
@OVERRIDES
@_RANKS
@_IMAGE
@_CLASSES
@_ALPHA
@_BETA
@_PER_NODE
@_MACHINE
@_JSON
def show(
    file: Path,
    overrides: tuple[str, ...],
    ranks: int | None,
    image: tuple[int, int, int] | None,
    classes: int | None,
    alpha_seconds: float,
    beta_seconds_per_byte: float,
    ranks_per_node: int | None,
    machine: str | None,
    as_json: bool,
) -> None:
    """Show what each rank owns, sends and holds, layer by layer.

    For each layer of FILE's model: its owners, halos, bytes sent and memory; then the averaging of gradients and the map of
    ranks. OVERRIDES such as grid.rows=2 win over the file.
    """
    task = _task(file, overrides, ranks, image, classes, machine)
    from hpctrain.cli import plan_tables
    from hpctrain.planner import planned_run
    from hpctrain.experiment.pinned_memory import pinned_memory

    report = planned_run.description(task)
    averaged = planned_run.group_schedules(task, _link(alpha_seconds, beta_seconds_per_byte), ranks_per_node)
    places, pinned = planned_run.rank_map(task.plan, ranks_per_node), pinned_memory(task, averaged)
    if as_json:
        for line in plan_tables.json_lines(plan_tables.as_dict(task, report, averaged, places, pinned)):
            echo(line)
        return
    plan_tables.print_plan(task, report, averaged, places, pinned)


@plan.command()
@FILE
@OVERRIDES
@_RANKS
@_IMAGE
@_CLASSES
@_ALPHA
@_BETA
@_PER_NODE
@_MACHINE
@_JSON
def schedule(
    file: Path,
    overrides: tuple[str, ...],
    ranks: int | None,
    image: tuple[int, int, int] | None,
    classes: int | None,
    alpha_seconds: float,
    beta_seconds_per_byte: float,
    ranks_per_node: int | None,
    machine: str | None,
    as_json: bool,
) -> None:
    """Show what the averager posts in its first steps.

    For each group of parameters: slices, owners, order, window and hash.

    A run measures alpha and beta, and orders some operations again by measured times; what it settles on lies in its directory.
    Sizes of slices follow by rule, whatever is measured, unless averager.sizes is "measured".
    """
    task = _task(file, overrides, ranks, image, classes, machine)
    from hpctrain.cli import plan_tables
    from hpctrain.planner import planned_run

    link = _link(alpha_seconds, beta_seconds_per_byte)
    averaged = planned_run.group_schedules(task, link, ranks_per_node)
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
    ranks: int | None,
    image: tuple[int, int, int] | None,
    classes: int | None,
    machine: str | None,
) -> PlannedRun:
    from hpctrain.config.checks import check_names
    from hpctrain.planner.planned_run import prepare

    config, source = load_config(file, overrides)
    check_names(config, source)
    if config.automatic:
        from hpctrain.run.automatic_search import planned

        config = planned(config, ranks, machine, image, classes)
    return prepare(config, ranks, image, classes)


def _link(alpha_seconds: float, beta_seconds_per_byte: float) -> LinkModel:
    from hpctrain.comm.link import LinkModel

    return LinkModel(alpha_seconds, beta_seconds_per_byte)
