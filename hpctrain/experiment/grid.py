"""The process grid that a configuration describes: its plan, and what can be said of it before there are data or ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.models import catalogue
from hpctrain.parallel.interior import Whole
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph


def columns(config: Config, ranks: int) -> int:
    """Pc in a world of so many ranks."""
    return config.grid.cols if config.grid.cols is not None else max(1, ranks // config.grid.rows)


def parallel_plan(config: Config, cols: int) -> ParallelPlan:
    """The parallelism of each layer.

    Raises:
        ConfigError: tiles that do not multiply to the rows.
    """
    use = {pattern: Parallelism(each) for pattern, each in config.plan.patterns.items()}
    patterns = config.grid.overlap
    names = layer_names(config) if patterns else ()
    overlapped = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    return ParallelPlan(config.grid.rows, cols, Parallelism(config.plan.default), use, config.grid.tiles, overlapped)


def layer_names(config: Config) -> tuple[str, ...]:
    """Dotted names of the model's layers, which no image's size changes; none where the model itself has a fault."""
    graph = model_graph(config)
    return () if graph is None else tuple(node.name for node in graph.nodes)


def splits_parameters(config: Config) -> bool:
    """True where the ranks of a column each hold a part of some layer's parameters; False where model or plan have a fault."""
    graph = model_graph(config)
    if graph is None or config.grid.rows == 1:
        return False
    try:
        plan = parallel_plan(config, config.grid.cols or 1)
        # Two rows split the layers that any more do, in no time.
        distributed = partition_graph(graph, replace(plan, rows=2, tiles=None, overlapped=frozenset()), (1, 0))
    except HpctrainError:
        return False
    placed = ((step.node, step.placement) for step in distributed.steps)
    return any(node and node.parameters and placement and placement.shard for node, placement in placed)


def model_graph(config: Config) -> Graph | None:
    """The model for one image of its usual size; None where the model has a fault."""
    name, options = config.model.name, config.model.options
    try:
        height, width, channels = catalogue.image_shape(name)
        channels = int(catalogue.check(name, options).get("channels_in", channels))
        builder = GraphBuilder(TensorSpec((1, height, width, channels), "float32"))
        return builder.build(catalogue.build(name, options).lower(builder, 0, ""))
    except HpctrainError:
        return None


@dataclass(frozen=True)
class Overlap:
    """The outcome of `grid.overlap`. parts: layers in parts, in order; whole: those that are not, with the reason."""

    parts: tuple[str, ...]
    whole: Mapping[str, Whole]


def overlap(graph: Graph, plan: ParallelPlan) -> Overlap:
    """Layers that the plan wants in parts: those that can be, and why others cannot. graph: the model for one image."""
    if plan.rows == 1:
        return Overlap((), {})
    whole = partition_graph(graph, plan, (1, *(0,) * (plan.rows - 1))).whole
    wanted = [node.name for node in graph.nodes if node.name in plan.overlapped]
    return Overlap(tuple(name for name in wanted if name not in whole), whole)


def overlap_faults(config: Config, graph: Graph, plan: ParallelPlan) -> Iterator[tuple[int, str, bool]]:
    """(number, sentence, whether other images could change it) of each pattern of `grid.overlap` that serves no layer at all."""
    whole = overlap(graph, plan).whole if config.grid.overlap else {}  # which many rows take long to find
    for number, pattern in enumerate(config.grid.overlap if whole else ()):
        matching = [node.name for node in graph.nodes if fnmatchcase(node.name, pattern)]
        if not matching or any(name not in whole for name in matching):
            continue
        # The reason of the layer that comes nearest to being served tells most.
        name = min(matching, key=lambda name: (not whole[name].by_size, whole[name].reason == "is no convolution"))
        sentence = (
            f"grid.overlap names {pattern!r}, but no such layer can be computed in parts: {name} {whole[name].reason}; it must "
            f"name a convolution under domain whose ranks have rows to compute while halos travel, or be left out."
        )
        yield number, sentence, whole[name].by_size


def check_overlap(config: Config, graph: Graph, plan: ParallelPlan) -> None:
    """Refuse patterns of `grid.overlap` that serve no layer. graph: the model for one image.

    Raises:
        ConfigError: a sentence for each pattern, with the layer and the rule.
    """
    sentences = [sentence for _, sentence, _ in overlap_faults(config, graph, plan)]
    if sentences:
        raise ConfigError("\n".join(sentences))


def check_batch(batch: int, rows: int, cols: int) -> None:
    """Refuse a batch of which some rank would never have a sample to work on. Ranks of a column work on each other's.

    Raises:
        ConfigError: naming the smallest batch.
    """
    if rows == 1 and batch < cols:
        raise ConfigError(f"batch is {batch}, but the {cols} columns of the grid share it; the smallest batch is {cols}.")


def describe(plan: ParallelPlan) -> str:
    """The grid and its plan in a few words."""
    grid = f"{plan.rows} x {plan.cols}"
    if plan.rows == 1:
        return grid
    tiles = "" if plan.tiles is None else f", images in {plan.tiles[0]} x {plan.tiles[1]} tiles"
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return f"{grid}: {plan.default}{uses}{tiles}"
