"""Times of operators for a choice at the start of a run: from the file of earlier ones, else measured on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.log import get_logger
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.operator_times import OperatorTimes, cache_file
from hpctrain.planner.program_timing_rest import ensure_measured, setting_here
from hpctrain.planner.search_space import SearchSpace, grid_shapes

_log = get_logger(__name__)


def measured_times(
    world: Communicator,
    job: Job,
    space: SearchSpace,
    *,
    threads: int,
    memory_bytes: int,
    budget_seconds: float,
    deadline_seconds: float,
) -> OperatorTimes:
    """Times of what the likely candidates compute, measured with all ranks at work; rank 0 keeps them. Collective.

    Args:
        threads: of a rank. memory_bytes: of a rank; candidates that take more are not measured.
        budget_seconds: after which nothing more is begun. deadline_seconds: that a rank waits for the others.

    Raises:
        ConfigError: no grid fits batch and ranks.
    """
    progress = ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort)
    node = world.split_shared_memory("node")
    times: OperatorTimes = world.broadcast_object(
        OperatorTimes(setting_here(job.kernels, threads, node.size), cache_file()) if world.rank == 0 else None
    )
    candidates = list(_likely(job, space, world.size))
    left = budget_seconds
    for some in (candidates[:1], candidates[1:]):  # whatever is chosen, it is compared with the first one
        coverage = ensure_measured(
            job,
            some,
            times,
            budget_seconds=left,
            memory_bytes=memory_bytes,
            before=lambda: progress.wait_handle(world.ibarrier(), "a timed step"),
            agree=world.broadcast_object,
        )
        left -= coverage.seconds
    if world.rank == 0:
        _keep(times)
    return times


def _likely(job: Job, space: SearchSpace, ranks: int) -> Iterator[Candidate]:
    """One use for all layers on each grid, or the plan that is fixed; data parallelism alone comes first."""
    micro_batches = space.fixed_micro_batches or 1
    shapes = sorted(grid_shapes(space, job.graph_of(1), ranks, job.batch))
    for rows, cols in shapes:
        fixed = space.fixed_plan
        if fixed is not None:
            tiles = fixed.tiles if fixed.rows == rows else None
            yield Candidate(ParallelPlan(rows, cols, fixed.default, fixed.use, tiles), micro_batches=micro_batches)
            continue
        for use in (Parallelism.BATCH,) if rows == 1 else Parallelism:
            yield Candidate(ParallelPlan(rows, cols, use), micro_batches=micro_batches)


def _keep(times: OperatorTimes) -> None:
    try:
        times.save()
    except OSError as error:
        _log.warning("The operator times cannot be kept (%s); they are measured again the next time.", error.strerror)
