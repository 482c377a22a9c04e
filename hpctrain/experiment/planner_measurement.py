"""Times of a job's operators, measured on this machine by as many processes at the same time as a node has ranks of the job.

Caches, memory and cores are then as busy as in a step. The processes need no MPI: they meet at barriers only.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.experiment import planned_job, planner_costs
from hpctrain.experiment.planner_search import SearchTask, job_of
from hpctrain.planner.job import Candidate
from hpctrain.planner.operator_times import OperatorTimes, Setting, cache_file
from hpctrain.planner.program_timing_rest import Coverage, ensure_measured, processor_model

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PATIENCE_SECONDS = 600.0  # of a process for the others: one that failed never comes


@dataclass(frozen=True)
class _Work:
    """The work of each process, as it can be sent there."""

    task: SearchTask
    candidates: tuple[Candidate, ...]
    setting: Setting
    budget_seconds: float


def measure(task: SearchTask, candidates: Sequence[Candidate], budget_seconds: float) -> Coverage:
    """Measure what the candidates compute and the user's cache does not know, for about so many seconds, and keep it there.

    Raises:
        ConfigError: the machine is not this one. OSError: the cache cannot be written.
    """
    if not planner_costs.is_here(task.machine):
        raise ConfigError(
            f"--measure measures this processor, {processor_model()}, but machine {task.machine.name} was not measured on it; "
            f"measure this machine with `hpctrain calibrate`, or leave --measure out."
        )
    setting = planner_costs.setting(task.machine, job_of(task))
    return _in_processes(_Work(task, tuple(candidates), setting, budget_seconds), setting.concurrency)


def _in_processes(work: _Work, processes: int) -> Coverage:
    """Run the work in so many processes; what the first of them says."""
    context = multiprocessing.get_context("spawn")
    barrier, decision, results = context.Barrier(processes), context.Value("b", 1), context.SimpleQueue()
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, str(work.setting.threads)))  # pools of threads read them when they start
    try:
        members = [
            context.Process(target=_measure, args=(work, number, barrier, decision, results), daemon=True)
            for number in range(processes)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    if any(member.exitcode for member in members):
        raise ConfigError("The operators could not be measured, as is told above; leave --measure out.")
    coverage: Coverage = results.get()
    return coverage


def _measure(work: _Work, number: int, barrier: Any, decision: Any, results: Any) -> None:
    """The work of one process. One that fails ends the others' waits."""
    try:
        _measure_with_others(work, number, barrier, decision, results)
    except BaseException:
        barrier.abort()
        raise


def _measure_with_others(work: _Work, number: int, barrier: Any, decision: Any, results: Any) -> None:
    """The first process decides for all when to stop, and keeps the times."""

    def agree(go_on: bool) -> bool:
        if number == 0:
            decision.value = go_on
        barrier.wait(_PATIENCE_SECONDS)
        answer = bool(decision.value)
        barrier.wait(_PATIENCE_SECONDS)
        return answer

    times = OperatorTimes(work.setting, cache_file())
    barrier.wait(_PATIENCE_SECONDS)  # all have read what there was before anything is written
    coverage = ensure_measured(
        planned_job.job(job_of(work.task)),
        work.candidates,
        times,
        budget_seconds=work.budget_seconds,
        memory_bytes=work.task.machine.memory_bytes,
        before=lambda: barrier.wait(_PATIENCE_SECONDS),
        agree=agree,
    )
    if number == 0:
        times.save()
        results.put(coverage)
