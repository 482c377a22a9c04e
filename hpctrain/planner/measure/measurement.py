"""Measure a machine with the ranks of a job, and operator times with ranks or separate processes, as inputs of plans.

`run_calibration` is the job of `hpctrain calibrate`. A job that chooses its plan at the start also measures its machine. Times of
operators are read from the user's cache. Missing times are measured by as many processes at once as a node has ranks, so that
caches, memory and cores are as busy as in a step. The processes of `plan search --measure` synchronise by barriers, without MPI.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.groups import node_numbers
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import ConfigError
from hpctrain.launch.threads import usable_cores
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.machine import Machine, OperatorClass, OperatorRate
from hpctrain.planner.costs.operator_times import OperatorTimes, Setting, cache_file, processor_model, setting_here
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.measure import calibration
from hpctrain.planner.measure.calibration import RankFacts, calibrate, rates_from_timings
from hpctrain.planner.measure.link_measurement import QUICK, THOROUGH
from hpctrain.planner.measure.program_timing import FEW_STEPS, Coverage, ensure_measured
from hpctrain.planner.search import configured_search
from hpctrain.planner.search.configured_search import SearchTask, on_any_grid
from hpctrain.planner.search.estimates import unsplit_plan
from hpctrain.planner.search.search_space import SearchSpace, grid_shapes
from hpctrain.storage.atomic_write import check_target
from hpctrain.trace.time_budget import TimeBudget

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def run_calibration(
    world: Communicator, kernels: KernelSet, threads: int, seconds: float, out: Path, deadline_seconds: float
) -> Machine:
    """Measure the machine and write its file on rank 0. Collective over `world`; return the machine on every rank.

    Args:
        deadline_seconds: maximum duration of one wait.

    Raises:
        OSError: the file cannot be written. All ranks raise it before the measurement if this is foreseeable, otherwise rank 0.
    """
    raise_on_all_ranks(world, lambda: check_target(out, streams=True) if world.rank == 0 else None)
    dtypes = "float32", "bfloat16"
    machine = measured(world, kernels, threads, deadline_seconds, seconds, out.stem, thorough=True, dtypes=dtypes)
    if world.rank == 0:
        machine_file.write(out, machine)
    return machine


def facts_here(threads: int = 1) -> RankFacts:
    """Return the cores on which this process may run, the memory of its node, the name of its processor, and its threads."""
    return RankFacts(frozenset(os.sched_getaffinity(0)), _memory_bytes(), processor_model(), threads)


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        physical = min(physical, limit)
    return physical


NAME = "measured at the run"
# Number of candidates to time before any other: pure data parallelism, and layers under `model` on the first two grids, which mix
# best with it. Unless all of them have times, predictions follow from rates.
_BASIS = 3


def measured(
    world: Communicator,
    kernels: KernelSet,
    threads: int,
    deadline_seconds: float,
    seconds: float = 60.0,
    name: str = NAME,
    *,
    thorough: bool = False,
    known_rates: Mapping[OperatorClass, OperatorRate] | None = None,
    dtypes: Sequence[str] = ("float32",),
) -> Machine:
    """Measure links, memory and rates within `seconds`. Collective over `world`; return the same machine on every rank.

    Args:
        thorough: whether to measure all that a machine file has, also the effect of threads; equal on all ranks.
        known_rates: rates of this rank; None on all ranks: measure them.
        dtypes: dtypes of activations to measure; bfloat16 is left out unless the processors of all ranks multiply it.
    """
    multiply_bfloat16 = all(world.allgather_object(getattr(kernels, "multiplies_bfloat16", False)))
    dtypes = [dtype for dtype in dtypes if multiply_bfloat16 or dtype != "bfloat16"]

    def rates(before: Callable[[], None]) -> Mapping[OperatorClass, OperatorRate]:
        return known_rates or calibration.measure_rates_of(kernels, threads, before, dtypes)

    def effect_of_threads(before: Callable[[], None]) -> tuple[Mapping[OperatorClass, OperatorRate], float]:
        with threadpool_limits(limits=1):  # networks are built under it, as oneDNN plans operators for a number of threads
            one_thread_rates = calibration.measure_rates_of(kernels, 1, before, dtypes)
        return one_thread_rates, calibration.measure_memory_traffic(threads, before)

    return calibrate(
        world,
        ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort),
        facts_here(threads),
        rates,
        name=name,
        when=time.strftime("%Y-%m-%d"),
        seconds=seconds,
        effort=THOROUGH if thorough else QUICK,
        measure_threads=effect_of_threads if thorough and kernels.arithmetic.on_host else None,
        physical_cores=usable_cores,
    )


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimedOperators:
    """Operators that were timed at the start of a job.

    Attributes:
        times: times on rank 0; without meaning on other ranks, or if there are no uses.
        uses: pairs (Pr, use of layers) whose operators all have times; empty if not even the first candidate was timed.
        rates: rates fitted to the times; None if nothing was timed.
    """

    times: OperatorTimes
    uses: frozenset[tuple[int, Parallelism]]
    rates: Mapping[OperatorClass, OperatorRate] | None


def measured_times(
    world: Communicator,
    job: Job,
    space: SearchSpace,
    threads: int,
    deadline_seconds: float,
    budget_seconds: float,
    memory_bytes: int | None = None,
) -> TimedOperators:
    """Measure the operators of likely candidates while all cores compute; rank 0 stores the times. Collective over `world`.

    At most one thread per core measures. Groups of nodes share the candidates and measure at the same time.

    Args:
        memory_bytes: memory of a rank, which candidates must not exceed. None: an equal share of this node's, on a new machine.

    Raises:
        ConfigError: no grid fits batch and ranks.
    """
    progress = ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort)
    node = world.split_shared_memory("node")
    cores = usable_cores(frozenset[int]().union(*node.allgather_object(os.sched_getaffinity(0))))
    candidates = sorted(_likely(job, space, world.size), key=lambda one: one.plan.default is Parallelism.DOMAIN)
    needed = [one for one in candidates if one.plan.default is not Parallelism.DOMAIN][:_BASIS] or candidates[:1]
    numbers = node_numbers(world, node)
    groups = min(max(numbers) + 1, len(candidates))
    group = numbers[world.rank] % groups
    comm = world.split(group if node.rank * threads < cores else None, world.rank, "ranks that time operators")
    times = OperatorTimes(setting_here(job.kernels, threads, node.size), cache_file() if world.rank == 0 else None)
    times = world.broadcast_object(times)
    _log.info("timing operators of %s%s, for up to 10 s", job.model, "" if memory_bytes else " and messages")
    timed = partial(
        ensure_measured,
        memory_bytes=memory_bytes or _memory_bytes() // node.size,
        repeats=FEW_STEPS,
        before=lambda: progress.wait_handle((comm or world).ibarrier(), "a timed step"),
    )
    within_seconds = 1.0 if 1 < node.size < world.size else 0.0  # is kept for the links within nodes
    budget = TimeBudget(budget_seconds - within_seconds, (comm or world).broadcast_object)
    timed_first = -(-len(needed) // groups)
    own = None if comm is None else timed(job, candidates[group::groups], times, budget=budget, basis=timed_first)
    results = world.allgather_object(None if own is None or comm is None or comm.rank else (times, own))
    coverage = _merged([result for result in results if result is not None], candidates, times)
    covered, timings = coverage.covered, coverage.timings
    uses = {(one.plan.rows, one.plan.default) for one in covered}
    if covered[: len(needed)] != tuple(needed):
        uses = set()
        if not covered and comm is not None:
            few = replace(job, batch=max(world.size, job.batch // 4))
            half = TimeBudget(budget_seconds / 2, comm.broadcast_object)
            timings = timed(few, candidates[:1], OperatorTimes(times.setting), budget=half, basis=1).timings
        _log.info("a step of %s takes too long to time its operators; the choice follows from their rates", job.model)
    elif len(covered) < len(candidates):
        left_out = [f"{one.plan.default} on {one.plan.rows} rows" for one in candidates if one not in covered]
        _log.info("not searched, because there was no time or memory to time them: %s", ", ".join(left_out))
    if budget.is_busy and node.size * threads <= cores:  # these times are too long for a quiet start, which would reuse them
        _log.info("other programs use the cores; the choice is for a quiet machine, and the next start times operators again")
    elif world.rank == 0:
        try:
            times.save()
        except OSError as error:
            _log.warning("Cannot store the operator times (%s); the next job measures them again.", error.strerror)
    uses |= {(rows, Parallelism.BATCH) for rows, _ in uses}
    rates = rates_from_timings(timings) if timings and world.rank == 0 else None
    return TimedOperators(times, frozenset(uses), world.broadcast_object(rates))


def _merged(results: Sequence[tuple[OperatorTimes, Coverage]], candidates: Sequence[Candidate], times: OperatorTimes) -> Coverage:
    """Return the coverage of all groups of nodes, with the candidates in their order, and add the times of others to `times`."""
    for node_times, _ in results:
        times.add_missing(node_times)
    coverages = [coverage for _, coverage in results]
    covered = tuple(one for one in candidates if any(one in coverage.covered for coverage in coverages))
    timings = tuple(timing for coverage in coverages for timing in coverage.timings)
    return Coverage(sum(coverage.programs for coverage in coverages), covered, timings)


def _likely(job: Job, space: SearchSpace, ranks: int) -> Iterator[Candidate]:
    """Yield candidates with one use for all layers on each grid, or with the fixed plan, those with which others mix first.

    A grid that splits layers also has layers of pure data parallelism; these do not differ from those of the first candidate.
    """
    micro_batches = space.fixed_micro_batches or 1
    shapes = sorted(grid_shapes(space, job.graph_of(1), ranks, job.batch))
    for number, (rows, cols) in enumerate(shapes):
        plan = unsplit_plan(space, (rows, cols))
        uses: tuple[Parallelism, ...] = (plan.default,)
        if rows > 1 and space.fixed_plan is None:
            uses = (*(() if number else (Parallelism.BATCH,)), Parallelism.MODEL, Parallelism.DOMAIN)
        for use in uses:
            yield Candidate(replace(plan, default=use), micro_batches=micro_batches)


_PATIENCE_SECONDS = 600.0  # maximum wait for other processes, which may have failed


def measure(task: SearchTask, candidates: Sequence[Candidate], budget_seconds: float) -> Coverage:
    """Measure the candidates' operators that are missing in the user's cache, and store their times there.

    Raises:
        ConfigError: the machine is not the one on which this process runs, or a process fails, for example because the cache
            cannot be written.
    """
    if not configured_search.is_here(task.machine):
        raise ConfigError(
            f"--measure measures this processor, {processor_model()}, but machine {task.machine.name} was not measured on it; "
            f"measure this machine with `hpctrain calibrate`, or omit --measure."
        )
    setting = configured_search.configured_setting(task.machine, on_any_grid(task))
    context, processes = multiprocessing.get_context("spawn"), setting.concurrency
    shared = context.Barrier(processes), context.Array("b", [1]), context.SimpleQueue()
    work = task, tuple(candidates), setting, budget_seconds
    members = [context.Process(target=_measure, args=(*work, number, shared), daemon=True) for number in range(processes)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    if any(member.exitcode for member in members):
        raise ConfigError("Cannot measure the operators (see the errors above); omit --measure.")
    coverage: Coverage = shared[2].get()
    return coverage


def _measure(
    task: SearchTask, candidates: Sequence[Candidate], setting: Setting, budget_seconds: float, number: int, shared: Any
) -> None:
    """Measure together with the other processes. The first process decides for all when to stop, and stores the times."""
    barrier, decision, results = shared

    def meet() -> None:
        barrier.wait(_PATIENCE_SECONDS)

    def agree(go_on: bool) -> bool:
        if number == 0:
            decision[0] = go_on
        meet()
        answer = bool(decision[0])
        meet()
        return answer

    try:
        with threadpool_limits(limits=setting.threads):
            times, budget = OperatorTimes(setting, cache_file()), TimeBudget(budget_seconds, agree)
            meet()  # all processes have read the cache before it is written
            job, memory_bytes = on_any_grid(task).job, task.machine.memory_bytes
            coverage = ensure_measured(job, candidates, times, budget=budget, memory_bytes=memory_bytes, before=meet)
        if number == 0:
            times.save()
            results.put(coverage)
    except BaseException:
        barrier.abort()  # ends the waits of the other processes
        raise
