"""The search at the start of a job: on rank 0, for its machine, with times that all ranks measure; told to all."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.job.automatic_choice import PredictedStep, chosen_words, predicted_step_of
from hpctrain.experiment.machine_here import measured
from hpctrain.experiment.start_times import measured_times
from hpctrain.experiment.started_job import StartedJob
from hpctrain.planner import machine_file
from hpctrain.planner.compute_costs_rest import ComputeCosts
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.machine import Machine
from hpctrain.planner.measured_costs import MeasuredCosts
from hpctrain.planner.predict import predict
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search import SearchChoice, search
from hpctrain.planner.search_space import SearchSpace

_TIMING_SECONDS = 20.0


@dataclass(frozen=True)
class BestCandidate:
    """The outcome of a search. next_best: the second one in words, with its step's seconds; empty where there was none.

    machine: that was measured for the search; None: none was.
    """

    candidate: Candidate
    prediction: PredictedStep
    next_best: str
    machine: Machine | None = None


def find(started: StartedJob, job: Job, space: SearchSpace, machine: str | None) -> BestCandidate:
    """The fastest candidate by prediction on the ranks of a started job. Collective; the same on every rank.

    Args:
        machine: a file or the name of an installed one; None: it is measured, within a minute.

    Raises:
        ConfigError: a machine file with a fault, or a job that fits in no plan.
    """
    if machine is None:
        there = measured(started.world, job.kernels, started.threads, started.deadline_seconds)
    else:
        there = started.on_root(lambda: machine_file.read(machine))
    costs: ComputeCosts = RateCosts(there, job.dtype)
    if job.kernels.arithmetic.on_host:
        times = measured_times(
            started.world,
            job,
            space,
            threads=started.threads,
            memory_bytes=there.memory_bytes,
            budget_seconds=_TIMING_SECONDS,
            deadline_seconds=started.deadline_seconds,
        )
        costs = MeasuredCosts(times, RateCosts(there, job.dtype))
    kept = there if machine is None else None
    return started.on_root(lambda: best(job, there, costs, started.world.size, space, kept))


def best(
    job: Job, machine: Machine, costs: ComputeCosts, ranks: int, space: SearchSpace, kept: Machine | None = None
) -> BestCandidate:
    """The fastest candidate by prediction. Pure.

    Raises:
        ConfigError: a job that fits in no plan.
    """
    first, *others = search(job, machine, costs, ranks, space, predicted_by=predict).choices
    return BestCandidate(
        first.candidate, predicted_step_of(first.prediction, machine), "" if not others else _words(others[0]), kept
    )


def _words(choice: SearchChoice) -> str:
    one = choice.candidate
    return f"{chosen_words(one.plan, one.averager, one.options)}: {choice.prediction.step.seconds:.3g} s"
