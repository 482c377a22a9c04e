"""The model of a configuration and its plan on a process grid, independent of data and ranks.

The configuration sets Pr and optionally Pc; `columns` returns Pc. `grid: auto` is replaced by a search (`run.automatic_search`)
before the session starts. A grid is checked three times: with the file, where the plan's patterns must match layers of the model
(`assembly.checks`); when the session starts, where Pr x Pc must be the number of ranks (`comm.groups.check_grid`); and when the
network is built, where each layer must be divisible (`GridDistribution.prepare`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpctrain.backend.graph import Graph
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Lowering
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph


def model_options(config: Config, classes: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the options of the configured model, with those that follow from the data and the section batch_norm.

    Args:
        classes: number of classes of the data.
        image_shape: shape (H, W, C) of the images.
    """
    following = {
        "classes": classes,
        "channels_in": image_shape[2],
        "seed": config.seed,
        "momentum": config.batch_norm.momentum,
        "epsilon": config.batch_norm.epsilon,
        "synchronised": config.batch_norm.statistics == "synchronised",
    }
    accepted = catalogue.options(config.model.name)
    return {name: value for name, value in following.items() if name in accepted} | config.model.options


def columns(config: Config, ranks: int) -> int:
    """Return the number of columns Pc of the grid in a world of `ranks` ranks."""
    return config.grid.cols if config.grid.cols is not None else max(1, ranks // config.grid.rows)


def parallel_plan(config: Config, cols: int) -> ParallelPlan:
    """Return the parallelism of each layer on `cols` columns.

    Raises:
        ConfigError: the product of the tiles is not `grid.rows`.
    """
    use = {pattern: Parallelism(use) for pattern, use in config.plan.patterns.items()}
    return ParallelPlan(config.grid.rows, cols, Parallelism(config.plan.default), use, config.grid.tiles)


def splits_parameters(config: Config) -> bool:
    """Return whether ranks of a split group hold parts of some parameters; False if the model or the plan has a fault."""
    if config.grid.rows == 1:
        return False
    try:
        graph = model_graph(config, catalogue.build(config.model.name, config.model.options))
        plan = parallel_plan(config, config.grid.cols or 1)
        # Two ranks split the same layers as any larger group, and their plan is made quickly.
        partitioned = partition_graph(graph, replace(plan, rows=2, tiles=None), (1, 0))
    except HpctrainError:
        return False
    shardings = ((step.node, step.sharding) for step in partitioned.steps)
    return any(node and node.trains and sharding and sharding.channel_intervals for node, sharding in shardings)


def model_graph(config: Config, model: Layer, side: int | None = None) -> Graph:
    """Return the graph of the configured model for one image of its default size, or of side x side.

    Raises:
        HpctrainError: the model does not support the size, or a pattern of frozen layers has a fault.
    """
    height, width, channels = catalogue.image_shape(config.model.name)
    channels = int(catalogue.check(config.model.name, config.model.options).get("channels_in", channels))
    return Lowering(model, config.init.freeze).graph(1, (side or height, side or width, channels))


def check_batch(batch: int, rows: int, cols: int) -> None:
    """Raise if a batch is so small that a rank would never have a sample. Ranks of a split group share all their samples.

    Raises:
        ConfigError: the batch is too small; the message names the minimum.
    """
    if rows == 1 and batch < cols:
        raise ConfigError(f"batch is {batch}, but {cols} ranks (grid.cols) share it; the smallest batch is {cols}.")


def describe(plan: ParallelPlan) -> str:
    """Return a short description of the grid and its plan."""
    grid = f"{plan.rows} x {plan.cols}"
    if plan.rows == 1:
        return grid
    tiles = "" if plan.tiles is None else f", images in {plan.tiles[0]} x {plan.tiles[1]} tiles"
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return f"{grid}: {plan.default}{uses}{tiles}"


def with_defaults(config: Config) -> Config:
    """Return the configuration with defaults in the sections that are `auto`: a run on a grid of one row."""
    defaults = {"grid": GridConfig(), "plan": PlanConfig(), "averager": AveragerConfig()}
    return config.model_copy(update={section: defaults[section] for section in config.automatic})
