"""Plans before a run: what a configuration means on so many ranks, without MPI and without the data's images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.slices import Slice
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.backend.backend import make_backend
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.comm.grid import check_grid, coordinates
from hpctrain.comm.link import LinkModel
from hpctrain.config.schema import Config
from hpctrain.data.format import ImageFile
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import counts as counts_over
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.experiment import grid
from hpctrain.experiment.averager import make_strategy
from hpctrain.experiment.model import model_options
from hpctrain.models import catalogue
from hpctrain.nn.distribution import Shard
from hpctrain.nn.network import ALL, MODEL, declared, local_spec
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.plan_report import PlanReport
from hpctrain.parallel.plan_reporter import report_plan

Image = tuple[int, int, int]


@dataclass(frozen=True)
class PlannedRun:
    """A configuration on a grid. image_shape: (H, W, C) as the network sees it. counts: samples of a step by position.

    assumption: a sentence that says what the plan assumes because the data are not there; empty where it assumes nothing.
    """

    config: Config
    plan: ParallelPlan
    image_shape: Image
    counts: tuple[int, ...]
    graph_of: Callable[[int], Graph]
    specs: Mapping[str, ParameterSpec]
    kernels: KernelSet
    assumption: str = ""


@dataclass(frozen=True)
class GroupSchedule:
    """The operations that the averager of one parameter group posts. split_ranks: the ranks of a split group that post them.
    schedule: None for a strategy that has none: one allreduce of all gradients after backward.

    samples: of the step, by rank of the group. order: the group's ranks as the schedule counts them; None: in their own order.
    exchanged: elements that each rank of the group exchanges in a step.
    """

    group: str
    split_ranks: tuple[int, ...]
    ranks: int
    elements: int
    samples: tuple[int, ...]
    schedule: CollectiveSchedule | None
    order: tuple[int, ...] | None = None

    @property
    def exchanged(self) -> tuple[int, ...]:
        if self.schedule is None:
            shares = counts_over(self.elements, self.ranks)
            return tuple(2 * (self.elements - share) for share in shares)
        order = self.order or tuple(range(self.ranks))
        samples = [self.samples[rank] for rank in order]
        return self._by_rank([sum(self.schedule.exchanged(place, samples).values()) for place in range(self.ranks)])

    def owned(self, piece: Slice) -> tuple[int, ...]:
        """Elements of a slice that each rank of the group owns."""
        return self._by_rank(piece.counts(self.ranks))

    def _by_rank(self, by_place: Sequence[int]) -> tuple[int, ...]:
        """Numbers that the schedule counts in `order`, in the ranks' own order."""
        numbers = dict(zip(self.order or range(self.ranks), by_place, strict=True))
        return tuple(numbers[rank] for rank in range(self.ranks))


def plan_for(config: Config, ranks: int | None) -> ParallelPlan:
    """The configured plan on so many ranks; None: on as many as the configured grid has.

    Raises:
        ConfigError: neither the grid nor anybody says what grid.cols is, or a batch that cannot be shared.
        ShapeError: a grid that does not multiply to the ranks; the message gives the nearest one that does.
    """
    cols = config.grid.cols
    if ranks is not None:
        cols = grid.columns(config, ranks)
        check_grid(config.grid.rows, cols, ranks)
    if cols is None:
        raise ConfigError("grid.cols is null, so the number of ranks is not known; give --ranks, or set grid.cols.")
    grid.check_batch(config.batch, config.grid.rows, cols)
    return grid.parallel_plan(config, cols)


def prepare(config: Config, ranks: int | None, image: Image | None = None, classes: int | None = None) -> PlannedRun:
    """Everything that plans follow from.

    Args:
        image, classes: (H, W, C) of the images as the network sees them, and their classes; None: from the header of the
            configured training file, or the model's own where there is no such file.

    Raises:
        HpctrainError: what the configuration, the file and the grid do not agree on.
    """
    plan = plan_for(config, ranks)
    assumption = ""
    if image is None or classes is None:
        missing = not Path(config.data.train).exists()
        known_image, known_classes = _of_the_model(config) if missing else _header(config)
        image, classes = image or known_image, classes or known_classes
        if missing:
            assumption = _assumption(config, image, classes)
    backend = make_backend(config.backend, config.dtype, config.precision, NodePlace(plan.rows * plan.cols))
    model = catalogue.build(config.model.name, model_options(config, classes, image))
    shape = image

    def graph_of(batch: int) -> Graph:
        builder = GraphBuilder(TensorSpec((batch, *shape), backend.dtype))
        return builder.build(model.lower(builder, 0, ""))

    sample = graph_of(1)
    plan.check([node.name for node in sample.nodes])
    grid.check_overlap(config, sample, plan)
    if plan.rows == 1:  # a run distributes nothing then
        plan = ParallelPlan(1, plan.cols)
    specs, _ = declared(model, sample)
    counts = counts_over(config.batch, plan.rows * plan.cols, plan.rows)
    return PlannedRun(config, plan, image, counts, graph_of, specs, backend.kernels, assumption)


def _header(config: Config) -> tuple[Image, int]:
    """Shape after augmentation, and classes; reads no image."""
    file = ImageFile.open(config.data.train)
    steps = [(step.name, step.options) for step in config.data.augment]
    pipeline = Pipeline(steps, seed=config.seed, mean=file.mean, std=file.std, dtype=config.dtype)
    return pipeline.output_shape(*file.shape), len(file.class_names)


def _of_the_model(config: Config) -> tuple[Image, int]:
    """The images that the model is meant for, as the configured augmentations leave them, and the classes that it has."""
    options = catalogue.check(config.model.name, config.model.options)
    height, width, channels = catalogue.image_shape(config.model.name)
    shape = (height, width, int(options.get("channels_in", channels)))
    steps = [(step.name, step.options) for step in config.data.augment]
    flat = np.zeros(shape[2])
    with suppress(ShapeError):  # crops of larger images than the model's: they end at what the model is meant for
        shape = Pipeline(steps, seed=config.seed, mean=flat, std=flat, dtype=config.dtype).output_shape(*shape)
    return shape, int(options.get("classes", 1))


def _assumption(config: Config, image: Image, classes: int) -> str:
    height, width, channels = image
    return (
        f"There is no {config.data.train} yet, so this assumes images of {height} x {width} x {channels} and {classes} classes, "
        f"the model's own where --image and --classes do not say; the file's will count once it is there."
    )


def description(task: PlannedRun) -> PlanReport:
    """The owners of everything, the bytes that move and the memory that it takes."""
    shapes = {name: spec.shape for name, spec in task.specs.items()}
    return report_plan(task.graph_of, task.plan, micro_counts(task), shapes, task.kernels)


def micro_counts(task: PlannedRun) -> tuple[int, ...]:
    """Samples of the first micro-batch, the largest, by position."""
    parts = task.config.micro_batches
    return tuple(-(-count // parts) for count in task.counts)


def group_schedules(task: PlannedRun, link: LinkModel, ranks_per_node: int | None = None) -> tuple[GroupSchedule, ...]:
    """The schedule of each averager's first steps over a link, from sizes alone. ranks_per_node: None: all on one node.

    Raises:
        ConfigError: an averager that a run would refuse.
    """
    partitioned = partition_graph(task.graph_of(1), task.plan, (1, *(0,) * (task.plan.rows - 1)))
    ranks_of: dict[GroupSchedule, list[int]] = {}  # equal ones are told once, with all ranks of a split group that post them
    for rank in range(task.plan.rows):
        for schedule in _schedules_of(task, _layouts(task, partitioned.shards_of(rank)), rank, link, ranks_per_node):
            ranks_of.setdefault(schedule, []).append(rank)
    schedules = (replace(schedule, split_ranks=tuple(ranks)) for schedule, ranks in ranks_of.items())
    return tuple(sorted(schedules, key=lambda schedule: schedule.group))


def _schedules_of(
    task: PlannedRun, layouts: Mapping[str, GroupLayout], split_rank: int, link: LinkModel, ranks_per_node: int | None
) -> list[GroupSchedule]:
    config, plan = task.config, task.plan
    node_of = {(r, c): node for r, c, node in rank_map(plan, ranks_per_node)}
    needs_norms = OPTIMIZERS.create(config.optimizer.name, config.optimizer.options).needs_norms
    schedules = []
    for name, layout in layouts.items():
        places = sorted(node_of, key=lambda place: place[::-1]) if name == ALL else [(split_rank, c) for c in range(plan.cols)]
        group = PlannedGroup(
            layout,
            len(places),
            [node_of[place] for place in places],
            config.batch,
            config.micro_batches,
            needs_norms=needs_norms,
            several_groups=MODEL in layouts,
        )
        strategy = make_strategy(config.averager.name, config.averager.options, group)
        samples = task.counts if name == ALL else _by_split_group(task.counts, plan.rows)
        order = None if strategy.levels is None else strategy.levels.order
        schedules.append(GroupSchedule(name, (), len(places), layout.size, samples, strategy.plan(link), order))
    return schedules


def _layouts(task: PlannedRun, shards: Mapping[str, Shard]) -> dict[str, GroupLayout]:
    """The parameter groups of a rank that has these parts of split parameters."""
    members: dict[str, dict[str, ParameterSpec]] = {}
    for name, spec in task.specs.items():
        shard = shards.get(name)
        members.setdefault(ALL if shard is None else MODEL, {})[name] = local_spec(spec, shard)
    orders = {name: order for order, name in enumerate(task.specs)}
    return {name: GroupLayout(inside, task.config.dtype, orders=orders) for name, inside in members.items()}


def _by_split_group(counts: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(sum(counts[first : first + size]) for first in range(0, len(counts), size))


def averaging_bytes(task: PlannedRun, schedules: Sequence[GroupSchedule]) -> tuple[int, ...]:
    """Bytes that each position exchanges in a step to average gradients, norms left out."""
    item_bytes = np.dtype(task.config.dtype).itemsize
    size = task.plan.rows
    total = [0] * len(task.counts)
    for schedule in schedules:
        for position in range(len(total)):
            split_rank, data_rank = position % size, position // size
            if split_rank in schedule.split_ranks:
                total[position] += item_bytes * schedule.exchanged[position if schedule.group == ALL else data_rank]
    return tuple(total)


def rank_map(plan: ParallelPlan, ranks_per_node: int | None) -> tuple[tuple[int, int, int], ...]:
    """(r, c, node) by world rank, where nodes hold consecutive ranks; None: all on one node."""
    size = plan.rows * plan.cols
    node_of = tuple(rank // (ranks_per_node or size) for rank in range(size))
    return tuple((r, c, node) for (r, c), node in zip(coordinates(node_of, plan.rows), node_of, strict=True))
