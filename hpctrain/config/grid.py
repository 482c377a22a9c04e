"""The model of a configuration and its plan on a process grid, independent of data and ranks.

The configuration sets Pr and optionally Pc; `columns` returns Pc. `grid: auto` is replaced by a search (`run.automatic_search`)
before the session starts. A grid is checked three times: with the file, where the plan's patterns must match layers of the model
(`config.checks`); when the session starts, where Pr x Pc must be the number of ranks (`comm.groups.check_grid`); and when the
network is built, where each layer must be divisible (`GridDistribution.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from hpctrain.backend.graph import Graph
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.models import catalogue
from hpctrain.nn.layers import lowered
from hpctrain.nn.network import frozen_layers, with_frozen
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.sharding_rules import NoInterior


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
    patterns = config.grid.overlap
    names = layer_names(config) if patterns else ()
    overlapped = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    return ParallelPlan(config.grid.rows, cols, Parallelism(config.plan.default), use, config.grid.tiles, overlapped)


def layer_names(config: Config) -> tuple[str, ...]:
    """Return the dotted names of the model's layers, which do not depend on image sizes; empty if the model has a fault."""
    graph = model_graph(config)
    return () if graph is None else tuple(node.name for node in graph.nodes)


def splits_parameters(config: Config) -> bool:
    """Return whether ranks of a split group hold parts of some parameters; False if the model or the plan has a fault."""
    if config.grid.rows == 1 or (graph := model_graph(config)) is None:
        return False
    try:
        plan = parallel_plan(config, config.grid.cols or 1)
        # Two ranks split the same layers as any larger group, and their plan is made quickly.
        partitioned = partition_graph(graph, replace(plan, rows=2, tiles=None, overlapped=frozenset()), (1, 0))
    except HpctrainError:
        return False
    shardings = ((step.node, step.sharding) for step in partitioned.steps)
    return any(node and node.trains and sharding and sharding.channel_intervals for node, sharding in shardings)


def model_graph(config: Config, side: int | None = None, *, refuses: bool = False) -> Graph | None:
    """Return the graph of the model for one image of its default size, or of side x side; None if the model has a fault.

    Args:
        refuses: whether to raise the fault instead of returning None.

    Raises:
        HpctrainError: the model has a fault, and `refuses` is set.
    """
    name, options = config.model.name, config.model.options
    try:
        height, width, channels = catalogue.image_shape(name)
        height, width = (side, side) if side is not None else (height, width)
        channels = int(catalogue.check(name, options).get("channels_in", channels))
        model = catalogue.build(name, options)
        return with_frozen(lowered(model, 1, (height, width, channels), "float32"), frozen_layers(model, config.init.freeze))
    except HpctrainError:
        if refuses:
            raise
        return None


@dataclass(frozen=True)
class OverlapOutcome:
    """The result of `grid.overlap`.

    Attributes:
        in_parts: names of layers that are computed in parts, in order.
        undivided: name -> reason, of each overlapped layer that is not computed in parts.
    """

    in_parts: tuple[str, ...]
    undivided: Mapping[str, NoInterior]


def overlap(graph: Graph, plan: ParallelPlan) -> OverlapOutcome:
    """Return which of the plan's overlapped layers can be computed in parts, and why the others cannot.

    Args:
        graph: graph of the model for one image.
    """
    if plan.rows == 1:
        return OverlapOutcome((), {})
    undivided = partition_graph(graph, plan, (1, *(0,) * (plan.rows - 1))).undivided
    wanted = [node.name for node in graph.nodes if node.name in plan.overlapped]
    return OverlapOutcome(tuple(name for name in wanted if name not in undivided), undivided)


def overlap_faults(config: Config, graph: Graph, plan: ParallelPlan) -> Iterator[tuple[int, str, bool]]:
    """Yield (index, sentence, whether it depends on the size of the images) for each pattern of `grid.overlap` without effect."""
    if plan.rows == 1:
        for number, pattern in enumerate(config.grid.overlap):
            sentence = f"grid.overlap names {pattern!r}, but grid.rows is 1, so no image is split and there are no halos; "
            yield number, sentence + "set grid.rows to 2 or more, or leave grid.overlap out.", False
        return
    undivided = overlap(graph, plan).undivided if config.grid.overlap else {}  # `overlap` is slow for a large split group
    for number, pattern in enumerate(config.grid.overlap if undivided else ()):
        matching = [node.name for node in graph.nodes if fnmatchcase(node.name, pattern)]
        if not matching or any(name not in undivided for name in matching):
            continue
        # Report the layer that comes closest to being computed in parts: its reason is the most useful.
        name = min(matching, key=lambda name: (not undivided[name].by_size, undivided[name].reason == "is not a convolution"))
        sentence = (
            f"grid.overlap names {pattern!r}, but no such layer can be computed in parts: {name} {undivided[name].reason}; "
            f"name a convolution under domain whose ranks have rows to compute while halos are exchanged, or leave it out."
        )
        yield number, sentence, undivided[name].by_size


def check_overlap(config: Config, graph: Graph, plan: ParallelPlan) -> None:
    """Raise if a pattern of `grid.overlap` has no effect.

    Args:
        graph: graph of the model for one image.

    Raises:
        ConfigError: one sentence for each such pattern, with the layer and the rule.
    """
    sentences = [sentence for _, sentence, _ in overlap_faults(config, graph, plan)]
    if sentences:
        raise ConfigError("\n".join(sentences))


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
