"""The grid of the configuration on the ranks of this job, by the rules that a training is refused by."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.grid import check_grid
from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.core.errors import HpctrainError
from hpctrain.config.grid import check_batch, columns, describe, parallel_plan
from hpctrain.run.single_values import SingleValues, single_values_of

WRONG_GRID = FindingKind(
    "wrong-grid",
    Severity.FAULT,
    "The grid of the configuration, or its batch, does not fit the number of ranks.",
    "Set `grid.rows` and `grid.cols` so that they multiply to the number of ranks.",
)

SINGLE_VALUE = FindingKind(
    "single-value",
    Severity.FAULT,
    "A batch norm would take its statistics over a single value per channel in every step, and pass on its bias alone.",
    "Set `batch` higher, or `batch_norm.statistics` to synchronised, or use larger images.",
)
SHORT_BATCH = FindingKind(
    "short-batch",
    Severity.REMARK,
    "The last batch of each epoch leaves a batch norm a single value per channel.",
    "Choose a `batch` that divides the images of an epoch or leaves a larger rest.",
)


def gather(place: OwnPlace) -> SingleValues | None:
    """Return the check of the job's batch norms, from the header of its training file. Only rank 0 reads it."""
    if place.config is None or not place.leads_job:
        return None
    return single_values_of(place.config, place.launcher.expected_size or 1)


def judge(job: JobView, facts: Sequence[SingleValues | None]) -> list[DoctorFinding]:
    """One finding."""
    config = job.config
    if config is None:
        return [fine("Not looked at: no configuration was given.")]
    if "grid" in config.automatic or "plan" in config.automatic:
        return [fine("Chosen when a training starts (auto).")]
    ranks = job.launcher.expected_size or job.size  # where each is alone, the grid is not what is wrong
    cols = columns(config, ranks)
    try:
        check_grid(config.grid.rows, cols, ranks)
        check_batch(config.batch, config.grid.rows, cols)
        plan = parallel_plan(config, cols)
    except HpctrainError as error:
        return [WRONG_GRID.from_error(str(error))]
    single = facts[0] or SingleValues()
    if single.refusal is not None:
        return [SINGLE_VALUE.from_error(single.refusal)]
    if single.warning is not None:
        return [SHORT_BATCH.found(f"{single.warning}.")]
    return [fine(f"{describe(plan)}.")]


CHECK = Check(
    "grid",
    "the configuration's grid and batch on this number of ranks",
    (WRONG_GRID, SINGLE_VALUE, SHORT_BATCH),
    gather,
    judge,
)
