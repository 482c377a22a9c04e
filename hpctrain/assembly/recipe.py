"""The recipe of a job: its model, plan, optimiser, averaging strategy and schedule, made from the configuration.

A recipe is used in three stages: with the configuration alone, where images have the model's default shape; with the facts of
images; and with the grid and the backend of a run. Its attributes are computed when they are first read, and can raise errors of
the configuration, so ranks must read them alike, inside `raise_on_all_ranks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.choice import Backend
from hpctrain.backend.graph import Graph
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.comm.groups import check_grid
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.text import counted
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import ImageShape, Lowering
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.schedules import SCHEDULES, LearningRateSchedule
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.training.passes import ranks_fault, split_fault


@dataclass(frozen=True)
class ImageFacts:
    """Facts about its images that a model needs, from the headers of files, a checkpoint or the command line.

    Attributes:
        shapes: shapes (H, W, C) of the network's input, the largest first.
        classes: number of classes; None: the model decides it.
        samples: number of samples of an epoch; 0 if it is unknown.
        class_weights: weight of each class in the loss of training steps; empty: all are 1.
        assumption: sentence that states what is assumed if the data do not exist yet; otherwise empty.
    """

    shapes: tuple[ImageShape, ...]
    classes: int | None = None
    samples: int = 0
    class_weights: tuple[float, ...] = ()
    assumption: str = ""


@dataclass(frozen=True)
class Given:
    """Objects that a program has made itself, instead of naming them in the configuration.

    Attributes:
        optimizer: function that returns an optimiser that is not bound to parameters yet.
    """

    model: Layer
    optimizer: Callable[[], Optimizer]


@dataclass(frozen=True, eq=False)
class Recipe:
    """Configuration with its averager, and the known facts about images, grid and backend.

    Attributes:
        averager: averager of the configuration, which resolves its options once for this recipe and all that are made from it.
        facts: facts about the images; None: the model's default images.
        grid: numbers of rows and columns; None: not known yet.
        backend: backend of this rank; None: graphs are lowered in float32.
        given: model and optimiser of a program; None: those that the configuration names.
    """

    config: Config
    averager: AveragerChoice
    facts: ImageFacts | None = None
    grid: tuple[int, int] | None = None
    backend: Backend | None = None
    given: Given | None = None

    @classmethod
    def of(cls, config: Config, facts: ImageFacts | None = None, grid: tuple[int, int] | None = None) -> Recipe:
        """Return the recipe of a configuration, with the facts about images and the grid if they are known."""
        return cls(config, AveragerChoice(config.averager.name, config.averager.options), facts, grid)

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of the model, with those that follow from the data and the section batch_norm if there are facts."""
        config, facts = self.config, self.facts
        if facts is None:
            return config.model.options
        following = {
            "classes": facts.classes,
            "channels_in": facts.shapes[0][2],
            "seed": config.seed,
            "momentum": config.batch_norm.momentum,
            "epsilon": config.batch_norm.epsilon,
            "synchronised": config.batch_norm.statistics == "synchronised",
        }
        accepted = catalogue.options(config.model.name)
        return {name: value for name, value in following.items() if name in accepted} | config.model.options

    @cached_property
    def model(self) -> Layer:
        """The model. Reading it raises a ConfigError if its name or an option is wrong."""
        if self.given is not None:
            return self.given.model
        return catalogue.build(self.config.model.name, self.model_options)

    @property
    def image_shape(self) -> ImageShape:
        """Largest shape (H, W, C) of the network's input."""
        if self.facts is not None:
            return self.facts.shapes[0]
        height, width, channels = catalogue.image_shape(self.config.model.name)
        options = catalogue.check(self.config.model.name, self.config.model.options)
        return height, width, int(options.get("channels_in", channels))

    @cached_property
    def lowering(self) -> Lowering:
        """Graphs of the model, with frozen layers. Reading it raises a ConfigError if `init.freeze` does not fit the model."""
        return Lowering(self.model, self.config.init.freeze, "float32" if self.backend is None else self.backend.dtype)

    @property
    def graph(self) -> Graph:
        """Graph of the model for one image of the largest shape. Reading it raises a ShapeError if the shape does not fit."""
        return self.lowering.graph(1, self.image_shape)

    @cached_property
    def plan(self) -> ParallelPlan:
        """Parallelism of each layer. Reading it raises a ConfigError if the product of the tiles is not `grid.rows`."""
        assert self.grid is not None, "a recipe without a grid has no plan"
        use = {pattern: Parallelism(use) for pattern, use in self.config.plan.patterns.items()}
        rows, cols = self.grid
        return ParallelPlan(rows, cols, Parallelism(self.config.plan.default), use, self.config.grid.tiles)

    @property
    def checked_plan(self) -> ParallelPlan:
        """The plan; on one row, no layer is split. Reading it raises a ConfigError if a pattern matches no layer of the model."""
        self.plan.check([node.name for node in self.graph.nodes])
        return self.plan if self.plan.rows > 1 else ParallelPlan(1, self.plan.cols)

    @property
    def splits_parameters(self) -> bool:
        """Whether ranks of a split group hold parts of some parameters; False if the model or the plan has a fault."""
        if self.config.grid.rows == 1:
            return False
        try:
            # Two ranks split the same layers as any larger group, and their plan is made quickly.
            partitioned = partition_graph(self.graph, replace(self.plan, rows=2, tiles=None), (1, 0))
        except HpctrainError:
            return False
        shardings = ((step.node, step.sharding) for step in partitioned.steps)
        return any(node and node.trains and sharding and sharding.channel_intervals for node, sharding in shardings)

    @cached_property
    def prototype(self) -> Optimizer:
        """An optimiser that is never bound to parameters, to read its properties."""
        return self.make_optimizer()

    def make_optimizer(self) -> Optimizer:
        """Return a new optimiser for one group of parameters."""
        if self.given is not None:
            return self.given.optimizer()
        return OPTIMIZERS.create(self.config.optimizer.name, self.config.optimizer.options)

    def schedule(self, samples: int = 0) -> LearningRateSchedule:
        """Return the learning-rate schedule for epochs of `samples` samples; by default, an epoch has one step.

        Raises:
            ConfigError: the schedule has a fault.
        """
        schedule, epochs = self.config.schedule, max(1, self.config.epochs)
        return SCHEDULES.create(
            schedule.name,
            schedule.options,
            base_lr=self.config.optimizer.lr,
            epochs=epochs,
            steps_per_epoch=max(1, -(-samples // self.config.batch)),
            warmup_epochs=min(schedule.warmup_epochs, epochs),  # `assembly.faults` reports a warm-up longer than the run
        )

    def on(self, ranks: int | None) -> Recipe:
        """Return the recipe on `ranks` ranks; None: on the configured grid.

        Raises:
            ConfigError: a section is auto, grid.cols is unknown, or the ranks cannot share the batch or the shards.
            ShapeError: the grid does not multiply to the number of ranks.
        """
        config = self.config
        if config.automatic:
            raise ConfigError(
                f"{' and '.join(config.automatic)} {'is' if len(config.automatic) == 1 else 'are'} auto, so there is no plan "
                f"yet; give values, or choose them with `hpctrain plan search` or `hpctrain plan show --machine`."
            )
        rows, cols = config.grid.rows, config.grid.cols
        if ranks is not None:
            cols = columns(config, ranks)
            check_grid(rows, cols, ranks)
        if cols is None:
            raise ConfigError("grid.cols is null, so the number of ranks is unknown; give --ranks, or set grid.cols.")
        check_batch(config.batch, rows, cols)
        shards = config.exact.shards
        fault = None if shards is None else split_fault(rows) or ranks_fault(shards, rows * cols)
        if fault is not None:
            raise ConfigError(fault)
        return replace(self, grid=(rows, cols))


def columns(config: Config, ranks: int) -> int:
    """Return the number of columns Pc of the grid in a world of `ranks` ranks."""
    return config.grid.cols if config.grid.cols is not None else max(1, ranks // config.grid.rows)


def check_batch(batch: int, rows: int, cols: int) -> None:
    """Raise if a grid of one row has more columns than the batch has samples, so that a rank would never have one.

    Raises:
        ConfigError: the batch is too small; the message names the minimum.
    """
    if rows == 1 and batch < cols:
        raise ConfigError(f"batch is {batch}, but {cols} ranks (grid.cols) share it; the smallest batch is {cols}.")


def with_defaults(config: Config) -> Config:
    """Return the configuration with defaults in the sections that are `auto`, such as a grid of one row."""
    defaults = {"grid": GridConfig(), "plan": PlanConfig(), "averager": AveragerConfig()}
    return config.model_copy(update={section: defaults[section] for section in config.automatic})


def describe(plan: ParallelPlan) -> str:
    """Return a short description of a grid and its plan."""
    grid = f"{plan.rows} x {plan.cols}"
    if plan.rows == 1:
        return grid
    tiles = "" if plan.tiles is None else f", images in {plan.tiles[0]} x {plan.tiles[1]} tiles"
    uses = "".join(f", {pattern} {use}" for pattern, use in plan.use.items())
    return f"{grid}: {plan.default}{uses}{tiles}"


def statistics_words(plan: ParallelPlan, graph: Graph, batch: int, micro_batches: int = 1) -> str:
    """Return a clause on the number of samples over which batch norms take their statistics in training; empty without any.

    Unless statistics are synchronised, these are the samples of a rank, or of a split group if the group shares the layer by its
    channels or images. With unequal shares, the number is the largest one.

    Args:
        graph: model lowered for one sample.
    """
    scopes: Counter[int] = Counter()  # layers by number of samples
    for step in partition_graph(graph, plan, (1, *(0,) * (plan.rows - 1))).steps:
        spec = None if step.node is None else step.node.spec
        if isinstance(spec, BatchNormSpec) and not spec.fixed and step.sharding is not None:
            by_samples = step.sharding.writes.kind is LayoutKind.SAMPLES
            groups = 1 if spec.synchronised else plan.cols * (plan.rows if by_samples else 1)
            scopes[-(-batch // (groups * micro_batches))] += 1
    parts = [
        counted(samples, "sample") + (f" in {counted(layers, 'layer')}" if len(scopes) > 1 else "")
        for samples, layers in scopes.items()
    ]
    return f"batch norm takes its statistics over {' and over '.join(parts)}" if parts else ""
