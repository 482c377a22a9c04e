"""The model and its plan on a process grid that a configuration describes, before there are data or ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.specs import TensorSpec
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.models import catalogue
from hpctrain.nn.network import frozen_layers, with_frozen
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.sharding_rules import NoInterior

if TYPE_CHECKING:
    pass


def model_options(config: Config, classes: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the options of the configured model, completed by the data and the section batch_norm.

    classes, image_shape: of the data, (H, W, C).
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
    """Return Pc in a world of `ranks` ranks."""
    return config.grid.cols if config.grid.cols is not None else max(1, ranks // config.grid.rows)


def parallel_plan(config: Config, cols: int) -> ParallelPlan:
    """Return the parallelism of each layer.

    Raises:
        ConfigError: tiles that do not multiply to `grid.rows`.
    """
    use = {pattern: Parallelism(use) for pattern, use in config.plan.patterns.items()}
    patterns = config.grid.overlap
    names = layer_names(config) if patterns else ()
    overlapped = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    return ParallelPlan(config.grid.rows, cols, Parallelism(config.plan.default), use, config.grid.tiles, overlapped)


def layer_names(config: Config) -> tuple[str, ...]:
    """Return the dotted names of the model's layers, which image sizes do not change; none if the model has a fault."""
    graph = model_graph(config)
    return () if graph is None else tuple(node.name for node in graph.nodes)


def splits_parameters(config: Config) -> bool:
    """Return whether each rank of a split group holds a part of some parameters; False if model or plan have a fault."""
    if config.grid.rows == 1 or (graph := model_graph(config)) is None:
        return False
    try:
        plan = parallel_plan(config, config.grid.cols or 1)
        # Two ranks split the same layers as any larger group, in no time.
        partitioned = partition_graph(graph, replace(plan, rows=2, tiles=None, overlapped=frozenset()), (1, 0))
    except HpctrainError:
        return False
    shardings = ((step.node, step.sharding) for step in partitioned.steps)
    return any(node and node.trains and sharding and sharding.channel_intervals for node, sharding in shardings)


def model_graph(config: Config, side: int | None = None, *, refuses: bool = False) -> Graph | None:
    """Return the model for one image of its usual size, or of side x side; None if the model has a fault.

    Raises:
        HpctrainError: the fault, where `refuses`.
    """
    name, options = config.model.name, config.model.options
    try:
        height, width, channels = catalogue.image_shape(name)
        height, width = (side, side) if side is not None else (height, width)
        channels = int(catalogue.check(name, options).get("channels_in", channels))
        builder = GraphBuilder(TensorSpec((1, height, width, channels), "float32"))
        model = catalogue.build(name, options)
        return with_frozen(builder.build(model.lower(builder, 0, "")), frozen_layers(model, config.init.freeze))
    except HpctrainError:
        if refuses:
            raise
        return None


@dataclass(frozen=True)
class OverlapOutcome:
    """The outcome of `grid.overlap`. in_parts: layers that are, in order. undivided: those that are not, with the reason."""

    in_parts: tuple[str, ...]
    undivided: Mapping[str, NoInterior]


def overlap(graph: Graph, plan: ParallelPlan) -> OverlapOutcome:
    """Return layers that the plan wants in parts: those that can be, and why others cannot. graph: the model for one image."""
    if plan.rows == 1:
        return OverlapOutcome((), {})
    undivided = partition_graph(graph, plan, (1, *(0,) * (plan.rows - 1))).undivided
    wanted = [node.name for node in graph.nodes if node.name in plan.overlapped]
    return OverlapOutcome(tuple(name for name in wanted if name not in undivided), undivided)


def overlap_faults(config: Config, graph: Graph, plan: ParallelPlan) -> Iterator[tuple[int, str, bool]]:
    """Yield (number, sentence, whether other images could change it) of each pattern of `grid.overlap` that matches in vain."""
    if plan.rows == 1:
        for number, pattern in enumerate(config.grid.overlap):
            sentence = f"grid.overlap names {pattern!r}, but grid.rows is 1, so that no image is split and no halo travels; "
            yield number, sentence + "set grid.rows to 2 or more, or leave grid.overlap out.", False
        return
    undivided = overlap(graph, plan).undivided if config.grid.overlap else {}  # a large split group takes long
    for number, pattern in enumerate(config.grid.overlap if undivided else ()):
        matching = [node.name for node in graph.nodes if fnmatchcase(node.name, pattern)]
        if not matching or any(name not in undivided for name in matching):
            continue
        # The reason of the layer that comes nearest to being served tells most.
        name = min(matching, key=lambda name: (not undivided[name].by_size, undivided[name].reason == "is not a convolution"))
        sentence = (
            f"grid.overlap names {pattern!r}, but no such layer can be computed in parts: {name} {undivided[name].reason}; "
            f"it must name a convolution under domain whose ranks have rows to compute while halos travel, or be left out."
        )
        yield number, sentence, undivided[name].by_size


def check_overlap(config: Config, graph: Graph, plan: ParallelPlan) -> None:
    """Refuse patterns of `grid.overlap` that serve no layer. graph: the model for one image.

    Raises:
        ConfigError: a sentence for each pattern, with the layer and the rule.
    """
    sentences = [sentence for _, sentence, _ in overlap_faults(config, graph, plan)]
    if sentences:
        raise ConfigError("\n".join(sentences))


def check_batch(batch: int, rows: int, cols: int) -> None:
    """Refuse a batch of which some rank would never have a sample to work on. Ranks of a split group work on each other's.

    Raises:
        ConfigError: naming the smallest batch.
    """
    if rows == 1 and batch < cols:
        raise ConfigError(f"batch is {batch}, but {cols} ranks (grid.cols) share it; the smallest batch is {cols}.")


def describe(plan: ParallelPlan) -> str:
    """Return the grid and its plan in a few words."""
    grid = f"{plan.rows} x {plan.cols}"
    if plan.rows == 1:
        return grid
    tiles = "" if plan.tiles is None else f", images in {plan.tiles[0]} x {plan.tiles[1]} tiles"
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return f"{grid}: {plan.default}{uses}{tiles}"


def with_defaults(config: Config) -> Config:
    """Return the configuration with the defaults in the sections that it leaves open: a run on a grid of one row."""
    defaults = {"grid": GridConfig(), "plan": PlanConfig(), "averager": AveragerConfig()}
    return config.model_copy(update={section: defaults[section] for section in config.automatic})
