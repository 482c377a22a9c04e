"""The grid of the configuration on the ranks of this job, by the rules that a training is refused by."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comm.grid import check_grid
from hpctrain.doctor.check import Check, JobView, nothing
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.errors import HpctrainError
from hpctrain.experiment.grid import check_batch, columns, describe, parallel_plan

WRONG_GRID = FindingKind(
    "wrong-grid",
    Severity.FAULT,
    "The grid of the configuration, or its batch, does not fit the number of ranks.",
    "Set `grid.rows` and `grid.cols` so that they multiply to the number of ranks.",
)


def judge(job: JobView, facts: Sequence[None]) -> list[DoctorFinding]:
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
    return [fine(f"{describe(plan)}.")]


CHECK = Check("grid", "the configuration's grid and batch on this number of ranks", (WRONG_GRID,), nothing, judge)
