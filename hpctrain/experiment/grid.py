"""The process grid that a configuration describes: its plan, and what can be said of it before there are data or ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.models import catalogue
from hpctrain.parallel.plan import GridPlan, RowUse


def columns(config: Config, ranks: int) -> int:
    """Pc in a world of so many ranks."""
    return config.grid.cols if config.grid.cols is not None else max(1, ranks // config.grid.rows)


def grid_plan(config: Config, cols: int) -> GridPlan:
    """What each layer does.

    Raises:
        ConfigError: tiles that do not multiply to the rows.
    """
    use = {pattern: RowUse(each) for pattern, each in config.plan.patterns.items()}
    patterns = config.grid.overlap
    names = layer_names(config) if patterns else ()
    overlapped = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    return GridPlan(config.grid.rows, cols, RowUse(config.plan.default), use, config.grid.tiles, overlapped)


def layer_names(config: Config) -> tuple[str, ...]:
    """Dotted names of the model's layers, which no image's size changes; none where the model itself has a fault."""
    name, options = config.model.name, config.model.options
    try:
        height, width, channels = catalogue.image_shape(name)
        channels = int(catalogue.check(name, options).get("channels_in", channels))
        builder = GraphBuilder(TensorSpec((1, height, width, channels), "float32"))
        graph = builder.build(catalogue.build(name, options).lower(builder, 0, ""))
    except HpctrainError:
        return ()
    return tuple(node.name for node in graph.nodes)


def check_batch(batch: int, rows: int, cols: int) -> None:
    """Refuse a batch of which some rank would never have a sample to work on. Ranks of a column work on each other's.

    Raises:
        ConfigError: naming the smallest batch.
    """
    if rows == 1 and batch < cols:
        raise ConfigError(f"batch is {batch}, but the {cols} columns of the grid share it; the smallest batch is {cols}.")


def describe(plan: GridPlan) -> str:
    """The grid and its plan in a few words."""
    grid = f"{plan.rows} x {plan.cols}"
    if plan.rows == 1:
        return grid
    tiles = "" if plan.tiles is None else f", images in {plan.tiles[0]} x {plan.tiles[1]} tiles"
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return f"{grid}: {plan.default}{uses}{tiles}"
