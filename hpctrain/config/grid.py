"""The model, its plan and its image sizes that a configuration describes, before there are data or ranks.

Options of the model, the process grid with the parallelism of each layer, the sizes of training images by epoch, and a
planner's
candidate as keys: what `train` takes so that it runs as was planned.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import yaml

from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.specs import TensorSpec
from hpctrain.config.load import dump
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.core.errors import ConfigError, HpctrainError, ShapeError
from hpctrain.core.yaml_source import KeyPath
from hpctrain.data.pipeline import ImageSizes, Pipeline, first_fault
from hpctrain.models import catalogue
from hpctrain.nn.network import ImageShape, Network, frozen_layers, with_frozen
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.sharding_rules import NoInterior

if TYPE_CHECKING:
    from hpctrain.planner.job import Candidate


def model_options(config: Config, classes: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Those of the configuration, with what the data and the batch_norm section say where it is silent.

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
    """Pc in a world of `ranks` ranks."""
    return config.grid.cols if config.grid.cols is not None else max(1, ranks // config.grid.rows)


def parallel_plan(config: Config, cols: int) -> ParallelPlan:
    """The parallelism of each layer.

    Raises:
        ConfigError: tiles that do not multiply to `grid.rows`.
    """
    use = {pattern: Parallelism(use) for pattern, use in config.plan.patterns.items()}
    patterns = config.grid.overlap
    names = layer_names(config) if patterns else ()
    overlapped = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    return ParallelPlan(config.grid.rows, cols, Parallelism(config.plan.default), use, config.grid.tiles, overlapped)


def layer_names(config: Config) -> tuple[str, ...]:
    """Dotted names of the model's layers, which no image's size changes; none where the model itself has a fault."""
    graph = model_graph(config)
    return () if graph is None else tuple(node.name for node in graph.nodes)


def splits_parameters(config: Config) -> bool:
    """True where each rank of a split group holds a part of some parameters; False where model or plan have a fault."""
    graph = model_graph(config)
    if graph is None or config.grid.rows == 1:
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
    """The model for one image of its usual size, or of side x side; None where the model has a fault.

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
    """Layers that the plan wants in parts: those that can be, and why others cannot. graph: the model for one image."""
    if plan.rows == 1:
        return OverlapOutcome((), {})
    undivided = partition_graph(graph, plan, (1, *(0,) * (plan.rows - 1))).undivided
    wanted = [node.name for node in graph.nodes if node.name in plan.overlapped]
    return OverlapOutcome(tuple(name for name in wanted if name not in undivided), undivided)


def overlap_faults(config: Config, graph: Graph, plan: ParallelPlan) -> Iterator[tuple[int, str, bool]]:
    """(number, sentence, whether other images could change it) of each pattern of `grid.overlap` that serves no layer at all."""
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
        name = min(matching, key=lambda name: (not undivided[name].by_size, undivided[name].reason == "is no convolution"))
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
    """The grid and its plan in a few words."""
    grid = f"{plan.rows} x {plan.cols}"
    if plan.rows == 1:
        return grid
    tiles = "" if plan.tiles is None else f", images in {plan.tiles[0]} x {plan.tiles[1]} tiles"
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return f"{grid}: {plan.default}{uses}{tiles}"


def image_sizes(config: Config) -> ImageSizes | None:
    """The sizes by epoch; None: training images have one size.

    Raises:
        ConfigError: sizes that are out of order.
    """
    return ImageSizes(_steps(config)) if config.data.sizes else None


def of_largest(config: Config, pipeline: Pipeline) -> Pipeline:
    """The pipeline of training images of the largest size, for which memory and plans are computed."""
    sizes = image_sizes(config)
    return pipeline if sizes is None else pipeline.resized(sizes.largest(config.epochs))


def size_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of sizes that are out of order, or that the model does not take, whatever the data."""
    fault = first_fault(_steps(config))
    if fault is not None:
        yield ("data", "sizes", fault[0]), f"data.sizes.{fault[0]} {fault[1]}."
        return
    if not config.data.sizes or model_graph(config) is None:  # what is wrong with the model has a sentence of its own
        return
    for number, step in enumerate(config.data.sizes):
        try:
            model_graph(config, step.size, refuses=True)
        except ShapeError as error:
            least = _least(config, step.size)
            legal = "" if least is None else f" The smallest size that is legal is {least}."
            yield (
                ("data", "sizes", number, "size"),
                f"data.sizes.{number}.size is {step.size}, which the model {config.model.name} does not take: {error}{legal}",
            )


def check_image_shapes(network: Network, shapes: Iterable[ImageShape]) -> None:
    """Nothing, where a network takes images of further shapes (H, W, C), too.

    Raises:
        ShapeError: it does not; the sentence names the shape and the layer.
    """
    for shape in shapes:
        try:
            network.check_shape(shape)
        except ShapeError as error:
            raise ShapeError(
                f"The model takes images of {network.image_shape} (H, W, C), but not those of {shape}, another size of this "
                f"training or its evaluation: {error}"
            ) from None


def _steps(config: Config) -> tuple[tuple[int, int], ...]:
    return tuple((step.from_epoch, step.size) for step in config.data.sizes)


def _least(config: Config, refused: int) -> int | None:
    """The smallest side above a refused one that the model takes, by halving; None where its own images are no larger."""
    least = min(catalogue.image_shape(config.model.name)[:2])
    if least <= refused:
        return None
    while least - refused > 1:
        middle = (least + refused) // 2
        with suppress(HpctrainError):
            model_graph(config, middle, refuses=True)
            least = middle
            continue
        refused = middle
    return least


_WIDEST = 1_000_000  # an override is one line


def keys_of(candidate: Candidate) -> dict[str, Any]:
    """The sections grid, plan and averager as wholes, and micro_batches, as plain data."""
    plan = candidate.plan
    return {
        "grid": _grid(plan),
        "plan": {"default": str(plan.default), **{pattern: str(use) for pattern, use in plan.use.items()}},
        "averager": {"name": candidate.averager, **candidate.options},
        "micro_batches": candidate.micro_batches,
    }


def _grid(plan: ParallelPlan) -> dict[str, Any]:
    grid: dict[str, Any] = {"rows": plan.rows, "cols": plan.cols}
    if plan.tiles is not None:
        grid["tiles"] = list(plan.tiles)
    if plan.overlapped:
        grid["overlap"] = sorted(plan.overlapped)
    return grid


def with_candidate(config: Config, candidate: Candidate) -> Config:
    """The configuration that runs the candidate, whatever it said about grid, plan, averager and micro-batches before."""
    return Config.model_validate({**config.model_dump(mode="json"), **keys_of(candidate)})


def with_defaults(config: Config) -> Config:
    """The configuration with the defaults in the sections that it leaves open: a run on a grid of one row."""
    defaults = {"grid": GridConfig(), "plan": PlanConfig(), "averager": AveragerConfig()}
    return config.model_copy(update={section: defaults[section] for section in config.automatic})


def overrides(candidate: Candidate) -> tuple[str, ...]:
    """The keys as overrides of a command line, each one word of it: "grid={rows: 2, cols: 4}"."""
    return tuple(f"{key}={flow(value)}" for key, value in keys_of(candidate).items())


def flow(value: Any) -> str:
    """YAML in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=_WIDEST)
    return text.removesuffix("\n...\n").strip()


def command_line(file: str, words: tuple[str, ...], ranks: int) -> str:
    """The command that trains a configuration on so many ranks, as a shell takes it."""
    start = f"mpiexec -n {ranks} python -m mpi4py -m hpctrain train"
    return " ".join((start, *(shlex.quote(word) for word in (file, *words))))


def written(config: Config, candidate: Candidate, head: tuple[str, ...]) -> str:
    """The whole configuration with the candidate's keys as YAML, behind lines of comments."""
    comments = "".join(f"# {line}\n" for line in head)
    return comments + dump(with_candidate(config, candidate))
