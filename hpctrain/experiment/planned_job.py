"""From a planned run to what the planner knows: the job, and the configured way to run it."""

from __future__ import annotations

from hpctrain.experiment.averager import make_strategy
from hpctrain.experiment.planned_run import PlannedRun
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
        needs_norms=optimizer.needs_norms,
        strategy=make_strategy,
    )


def candidate(task: PlannedRun) -> Candidate:
    """The grid, plan and averager that are configured."""
    averager = task.config.averager
    return Candidate(task.plan, averager.name, averager.options, task.config.micro_batches)
