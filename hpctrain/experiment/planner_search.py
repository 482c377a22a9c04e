"""The planner's search for a configuration: the job that it is, whatever grid, plan and averager it names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hpctrain.comm.grid import check_grid
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config.schema import AveragerConfig, Config, GridConfig, PlanConfig
from hpctrain.config import grid
from hpctrain.experiment import planned_job, planner_costs
from hpctrain.experiment.candidate_keys import with_candidate
from hpctrain.planner.planned_run import prepare
from hpctrain.experiment.planned_run import Image, PlannedRun
from hpctrain.planner.averaging_costs import AveragerChoice
from hpctrain.planner.machine import Machine
from hpctrain.planner.predict import predict
from hpctrain.planner.prediction import SimulationOptions
from hpctrain.planner.search import SearchResult, search
from hpctrain.planner.search_space import SearchSpace

#: sections of a configuration that a search chooses
SECTIONS = ("grid", "plan", "averager", "micro_batches")


@dataclass(frozen=True)
class SearchTask:
    """A search that is asked for.

    machine: as it is; factors: keywords of `Machine.scaled`, by which it is changed. keep: sections of the configuration that
    stay as they are. image: (H, W, C), and classes: None as in `prepare`.
    """

    config: Config
    ranks: int
    machine: Machine
    factors: Mapping[str, float] = field(default_factory=dict)
    keep: Collection[str] = ()
    image: Image | None = None
    classes: int | None = None


@dataclass(frozen=True)
class PlannedSearch:
    """A search and its result. job: on a grid that stands for any."""

    task: SearchTask
    job: PlannedRun
    result: SearchResult


def job_of(task: SearchTask) -> PlannedRun:
    """The job on a grid that it can be planned on: what is searched for is not asked of the configuration.

    Raises:
        HpctrainError: what the configuration and the data do not agree on.
    """
    config, ranks = task.config, task.ranks
    rows = next(rows for rows in range(1, ranks + 1) if ranks % rows == 0 and ranks // rows <= config.batch)
    open_sections = {"grid": GridConfig(rows=rows), "plan": PlanConfig(), "averager": AveragerConfig(), "micro_batches": 1}
    return prepare(config.model_copy(update=open_sections), ranks, task.image, task.classes)


def progress_of(config: Config) -> ProgressMode:
    """The mode of progress that is simulated: as configured, where it is not left to a measurement."""
    return ProgressMode.TEST if config.progress == "auto" else ProgressMode(config.progress)


def space_of(task: SearchTask, job: PlannedRun) -> SearchSpace:
    """All grids, plans, averagers and micro-batches, but those that the configuration names in sections that are kept.

    Raises:
        ConfigError, ShapeError: a grid or a plan that is to be kept, and that so many ranks cannot have.
    """
    config, ranks, keep = task.config, task.ranks, task.keep
    fixed_grid, fixed_plan = None, None
    if "grid" in keep:
        fixed_grid = config.grid.rows, grid.columns(config, ranks)
        check_grid(*fixed_grid, ranks)
        grid.check_batch(config.batch, *fixed_grid)
    elif not job.kernels.arithmetic.on_host:  # the costs know of no way through the host's memory, which split layers take
        fixed_grid = (1, ranks)
    if "plan" in keep:
        fixed_plan = grid.parallel_plan(config, grid.columns(config, ranks))
    return SearchSpace(
        fixed_grid=fixed_grid,
        fixed_plan=fixed_plan,
        fixed_averager=AveragerChoice(config.averager.name, config.averager.options) if "averager" in keep else None,
        fixed_micro_batches=config.micro_batches if "micro_batches" in keep else None,
        options=SimulationOptions(progress=progress_of(config)),
    )


def run(task: SearchTask) -> PlannedSearch:
    """Search.

    Raises:
        ConfigError: no grid has a place for so many ranks, or a job that fits in no plan.
    """
    job = job_of(task)
    costs = planner_costs.costs(task.machine, job, task.factors.get("compute", 1.0))
    machine, space = task.machine.scaled(**task.factors), space_of(task, job)
    result = search(planned_job.job(job), machine, costs, task.ranks, space, predicted_by=predict)
    return PlannedSearch(task, job, result)


def chosen(task: SearchTask) -> Config:
    """The configuration with a value for each section that it leaves open (auto): the best by a search, where there is any.

    Raises:
        ConfigError: as `run`.
    """
    return with_candidate(task.config, run(task).result.best.candidate) if task.config.automatic else task.config
