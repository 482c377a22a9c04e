"""Plans before a run: what a configuration means on so many ranks, without MPI and without the data's images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hpctrain.backend import dtypes
from hpctrain.backend.choice import make_backend
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.specs import TensorSpec
from hpctrain.comm.grid import check_grid, coordinates
from hpctrain.comm.link import LinkModel
from hpctrain.config.data_section import SYNTHETIC
from hpctrain.config.schema import Config
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import counts as counts_over
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.config import grid
from hpctrain.experiment import planned_job
from hpctrain.experiment.image_sizes import of_largest
from hpctrain.run.images import open_images
from hpctrain.experiment.model import model_options
from hpctrain.experiment.planned_run import Image, PlannedRun
from hpctrain.models import catalogue
from hpctrain.nn.frozen import frozen_layers, with_frozen
from hpctrain.nn.network import declared
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.plan_report_rest import PlanReport
from hpctrain.parallel.plan_report import report_plan
from hpctrain.planner import group_schedules as schedules
from hpctrain.planner.group_schedules import GroupSchedule


def plan_for(config: Config, ranks: int | None) -> ParallelPlan:
    """The configured plan on so many ranks; None: on as many as the configured grid has.

    Raises:
        ConfigError: neither the grid nor anybody says what grid.cols is, or a batch that cannot be shared.
        ShapeError: a grid that does not multiply to the ranks; the message gives the nearest one that does.
    """
    if config.automatic:
        raise ConfigError(
            f"{' and '.join(config.automatic)} {'is' if len(config.automatic) == 1 else 'are'} auto, so there is no plan yet; "
            f"give values, or let `hpctrain plan search` or `hpctrain plan show --machine` choose them."
        )
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
        missing = config.data.train != SYNTHETIC and not Path(config.data.train).exists()
        known_image, known_classes = _of_the_model(config) if missing else _header(config)
        image, classes = image or known_image, classes or known_classes
        if missing:
            assumption = _assumption(config, image, classes)
    backend = make_backend(config.backend, config.dtype, config.precision, NodePlace(plan.rows * plan.cols))
    model = catalogue.build(config.model.name, model_options(config, classes, image))
    shape, frozen = image, frozen_layers(model, config.init.freeze)

    def graph_of(batch: int) -> Graph:
        builder = GraphBuilder(TensorSpec((batch, *shape), backend.dtype))
        return with_frozen(builder.build(model.lower(builder, 0, "")), frozen)

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
    file = open_images(config, "train")
    steps = [(step.name, step.options) for step in config.data.augment]
    pipeline = Pipeline(steps, seed=config.seed, mean=file.mean, std=file.std, dtype=config.dtype)
    return of_largest(config, pipeline).output_shape(*file.shape), len(file.class_names)


def _of_the_model(config: Config) -> tuple[Image, int]:
    """The images that the model is meant for, as the configured augmentations leave them, and the classes that it has."""
    options = catalogue.check(config.model.name, config.model.options)
    height, width, channels = catalogue.image_shape(config.model.name)
    shape = (height, width, int(options.get("channels_in", channels)))
    steps = [(step.name, step.options) for step in config.data.augment]
    flat = np.zeros(shape[2])
    with suppress(ShapeError):  # crops of larger images than the model's: they end at what the model is meant for
        pipeline = Pipeline(steps, seed=config.seed, mean=flat, std=flat, dtype=config.dtype)
        shape = of_largest(config, pipeline).output_shape(*shape)
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
    return schedules.group_schedules(planned_job.job(task), planned_job.candidate(task), link, ranks_per_node)


def averaging_bytes(task: PlannedRun, planned: Sequence[GroupSchedule]) -> tuple[int, ...]:
    """Bytes that each position exchanges in a step to average gradients, norms left out."""
    item_bytes = dtypes.item_bytes(dtypes.parameter_dtype(task.config.dtype))
    return schedules.averaging_bytes(planned, task.plan.rows, len(task.counts), item_bytes)


def rank_map(plan: ParallelPlan, ranks_per_node: int | None) -> tuple[tuple[int, int, int], ...]:
    """(r, c, node) by world rank, where nodes hold consecutive ranks; None: all on one node."""
    size = plan.rows * plan.cols
    node_of = tuple(rank // (ranks_per_node or size) for rank in range(size))
    return tuple((r, c, node) for (r, c), node in zip(coordinates(node_of, plan.rows), node_of, strict=True))
