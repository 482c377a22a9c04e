"""Plan a configuration as a job, without MPI and without reading images.

`prepare` puts a configuration on a grid and determines everything from which plans follow. `description` returns the consequences
for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpctrain.assembly.images import of_largest, open_images, training_images
from hpctrain.assembly.recipe import ImageFacts, Recipe
from hpctrain.backend import specs as dtypes
from hpctrain.backend.choice import Backend, make_backend
from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.config.schema import SYNTHETIC, Config
from hpctrain.core.errors import ShapeError
from hpctrain.data.pipeline import Pipeline
from hpctrain.models import catalogue
from hpctrain.nn.initialise import constant
from hpctrain.nn.network import ImageShape, Lowering, declared
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Optimizer
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.plan_report import PlanReport, report_plan
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.program import group_schedules as schedules
from hpctrain.planner.program.group_schedules import GroupSchedule


@dataclass(frozen=True)
class PlannedRun:
    """Configuration on a grid.

    Attributes:
        recipe: configuration, its grid, the backend, and facts about the images.
        job: the job without its grid, plan and averager.
        plan: grid and use of each layer.
        counts: samples of a step by position.
    """

    recipe: Recipe
    job: Job
    plan: ParallelPlan
    counts: tuple[int, ...]

    @property
    def config(self) -> Config:
        return self.recipe.config

    @property
    def assumption(self) -> str:
        """Sentence with the assumptions of the plan if the data do not exist yet; otherwise empty."""
        return "" if self.recipe.facts is None else self.recipe.facts.assumption

    @property
    def candidate(self) -> Candidate:
        """The configured plan, averager and number of micro-batches."""
        return Candidate(self.plan, self.recipe.averager, self.config.micro_batches)


def job_of(
    name: str,
    lowering: Lowering,
    kernels: KernelSet,
    image_shape: ImageShape,
    batch: int,
    optimizer: Optimizer,
    *,
    averages: bool = False,
    shards: int | None = None,
) -> Job:
    """Return the job that trains a model.

    Args:
        image_shape: (H, W, C) of the model's input.
        batch: samples of a step over all ranks.
        optimizer: optimiser that is not in use by a replica.
        averages: whether an average of the weights is kept.
        shards: number of shards whose sums have a fixed order; None: the order depends on the ranks.

    Raises:
        ShapeError: the layers do not fit each other or the images.
    """

    def graph_of(samples: int) -> Graph:
        return lowering.graph(samples, image_shape)

    specs, _ = declared(lowering.model, graph_of(1))
    state = state_arrays(optimizer)
    return Job(
        name,
        graph_of,
        specs,
        kernels,
        graph_of(1).tensors[0].dtype,
        image_shape,
        batch,
        optimizer.norms_needed,
        optimizer.momentum,
        state + int(averages),
        update_factor(optimizer, state, averages=averages),
        shards,
    )


# Time of a pass over an element in a cache, in accesses to memory (measured on one thread, see docs/planner.md).
_PASS_ACCESSES = 2.0
# Accesses and passes of an update with momentum and weight decay: reads of weight, gradient and momentum, and two writes.
_REFERENCE_ACCESSES = 5 + _PASS_ACCESSES * 3


def update_factor(optimizer: Optimizer, state: int, *, averages: bool = False) -> float:
    """Return the time of an optimiser's update, without norms, relative to that of SGD with momentum and weight decay.

    An update reads the weight and the gradient, writes the weight, and reads and writes each array of the state. If the optimiser
    prepares norms, it also writes the gradient, and reads it and the weight once more. An average of the weights takes one more
    pass with three accesses.

    Args:
        state: number of arrays of the optimiser's state.
        averages: whether an average of the weights is kept.
    """
    accesses = 3 + 2 * state + 3 * optimizer.prepares_norms + 3 * averages
    return (accesses + _PASS_ACCESSES * (optimizer.passes + averages)) / _REFERENCE_ACCESSES


def state_arrays(optimizer: Optimizer) -> int:
    """Return the number of elements that an optimiser keeps per parameter element.

    The function binds the optimiser to a parameter with one element.
    """
    group = FlatGroup({"weight": ParameterSpec((1,), constant(0.0))})
    optimizer.bind(group, group.segments)
    return sum(int(array.size) for array in optimizer.state(group.segments[0]).values())


def prepare(
    config: Config,
    ranks: int | None,
    image: ImageShape | None = None,
    classes: int | None = None,
    backend: Backend | None = None,
) -> PlannedRun:
    """Put a configuration on a grid, and determine everything from which plans follow.

    Args:
        ranks: number of ranks; None: the size of the configured grid.
        image: (H, W, C) of the network's input; None: from the header of the training file, or the model's default without a
            file.
        classes: number of classes; None: from the header of the training file, or the model's default without a file.
        backend: backend of this rank; None: make the configured one.

    Raises:
        HpctrainError: configuration, file and grid do not agree.
    """
    recipe = Recipe.of(config).on(ranks)
    facts = _facts(config, image, classes)
    backend = backend or make_backend(config.backend, config.dtype, config.precision)
    recipe = replace(recipe, facts=facts, backend=backend)
    plan = recipe.checked_plan
    job = job_of(
        *(config.model.name, recipe.lowering, backend.kernels, recipe.image_shape, config.batch, recipe.make_optimizer()),
        averages=config.ema.decay is not None,
        shards=config.exact.shards,
    )
    return PlannedRun(recipe, job, plan, job.counts(plan.rows * plan.cols, plan.rows))


def _facts(config: Config, image: ImageShape | None, classes: int | None) -> ImageFacts:
    """Return given facts about the images, or those of the file's header, or of the model's default images without a file."""
    if image is not None and classes is not None:
        return ImageFacts((image,), classes)
    if config.data.train == SYNTHETIC or Path(config.data.train).exists():
        facts = training_images(config, open_images(config, "train"), None)[0].facts(config.epochs)
        return ImageFacts((image or facts.shapes[0],), classes or facts.classes)
    known_image, known_classes = _of_the_model(config)
    image, classes = image or known_image, classes or known_classes
    height, width, channels = image
    assumption = (
        f"{config.data.train} does not exist yet, so this assumes images of {height} x {width} x {channels} and {classes} "
        f"classes (the model's defaults, unless --image and --classes are given); once the file exists, its values are used."
    )
    return ImageFacts((image,), classes, assumption=assumption)


def _of_the_model(config: Config) -> tuple[ImageShape, int]:
    """Return the shape of the model's default images after the configured augmentations, and its number of classes."""
    options = catalogue.check(config.model.name, config.model.options)
    shape = Recipe.of(config).image_shape
    steps = [(step.name, step.options) for step in config.data.augment]
    flat = np.zeros(shape[2])
    with suppress(ShapeError):  # if crops need larger images than the model's default, keep the default
        pipeline = Pipeline(steps, seed=config.seed, mean=flat, std=flat, dtype=config.dtype)
        shape = of_largest(config, pipeline).output_shape(*shape)
    return shape, int(options.get("classes", 1))


def description(task: PlannedRun, reported: Sequence[int] | None = None) -> PlanReport:
    """Return a report of the owners of parameters and activations, the exchanged bytes and the memory.

    Args:
        reported: indices c of the split groups whose positions the report contains, in order; None: all.
    """
    shapes = {name: spec.shape for name, spec in task.job.specs.items()}
    return report_plan(task.job.graph_of, task.plan, micro_counts(task), shapes, task.job.kernels, reported)


def equal_split_groups(task: PlannedRun) -> tuple[tuple[int, ...], ...]:
    """Return classes of split groups with equal samples, and therefore with equal reports. Each class lists indices c."""
    rows, classes = task.plan.rows, dict[tuple[int, ...], list[int]]()
    for c in range(task.plan.cols):
        classes.setdefault(task.counts[c * rows : (c + 1) * rows], []).append(c)
    return tuple(map(tuple, classes.values()))


def micro_counts(task: PlannedRun) -> tuple[int, ...]:
    """Return the samples of each position in the first micro-batch, which is the largest."""
    parts = task.config.micro_batches
    return tuple(-(-count // parts) for count in task.counts)


def averaging_bytes(task: PlannedRun, planned: Sequence[GroupSchedule]) -> tuple[int, ...]:
    """Return the bytes that each position exchanges in a step to average gradients by the schedules `planned`, without norms."""
    item_bytes = dtypes.item_bytes(dtypes.parameter_dtype(task.config.dtype))
    return schedules.averaging_bytes(planned, task.plan.rows, len(task.counts), item_bytes)
