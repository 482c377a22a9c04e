"""From a planned run to what the planner knows: the job, and the configured way to run it."""

from __future__ import annotations

from hpctrain.backend.operators import KernelSet
from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.specs import TensorSpec
from hpctrain.averaging.averagers import make_strategy
from hpctrain.experiment.planned_run import Image, PlannedRun
from hpctrain.nn.initialise import constant
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import declared
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.planner.job import Candidate, Job


def job(task: PlannedRun) -> Job:
    """The training, whatever its grid, plan and averager."""
    config = task.config
    optimizer = OPTIMIZERS.create(config.optimizer.name, config.optimizer.options)
    return Job(
        model=config.model.name,
        graph_of=task.graph_of,
        specs=task.specs,
        kernels=task.kernels,
        dtype=task.graph_of(1).tensors[0].dtype,
        image_shape=task.image_shape,
        batch=config.batch,
        norms_needed=optimizer.norms_needed,
        strategy=make_strategy,
        momentum=optimizer.momentum,
        state_arrays=state_arrays(optimizer, averages=config.ema.decay is not None),
    )


def state_arrays(optimizer: Optimizer, *, averages: bool) -> int:
    """The numbers that a bound optimiser keeps for each element; binds it to a parameter of one number, to count them.

    Args:
        averages: an average of the weights is kept, too.
    """
    group = FlatGroup({"weight": ParameterSpec((1,), constant(0.0))})
    optimizer.bind(group, group.segments)
    sizes = [int(array.size) for array in optimizer.state(group.segments[0]).values()]
    return sum(sizes) + int(averages)


def of_network(
    model: Layer,
    image_shape: Image,
    kernels: KernelSet,
    *,
    dtype: str,
    batch: int,
    optimizer: Optimizer,
    averages: bool = False,
) -> Job:
    """The training of a network that was made in Python.

    Args:
        dtype: of activations. batch: samples of a step over all ranks. optimizer: of no replica. averages: an average of the
            weights is kept.

    Raises:
        ShapeError: layers that do not fit each other or the images.
    """

    def graph_of(samples: int) -> Graph:
        builder = GraphBuilder(TensorSpec((samples, *image_shape), dtype))
        return builder.build(model.lower(builder, 0, ""))

    specs, _ = declared(model, graph_of(1))
    return Job(
        type(model).__name__,
        graph_of,
        specs,
        kernels,
        dtype,
        image_shape,
        batch,
        norms_needed=optimizer.norms_needed,
        strategy=make_strategy,
        momentum=optimizer.momentum,
        state_arrays=state_arrays(optimizer, averages=averages),
    )


def candidate(task: PlannedRun) -> Candidate:
    """The grid, plan and averager that are configured."""
    averager = task.config.averager
    return Candidate(task.plan, averager.name, averager.options, task.config.micro_batches)
