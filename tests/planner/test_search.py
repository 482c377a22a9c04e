"""Searches against simulations that are made up: what is simulated, what wins, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpctrain.errors import ConfigError
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.averaging_costs import AveragerChoice
from hpctrain.planner.compute_costs import ComputeCosts
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.machine import Machine
from hpctrain.planner.prediction import Prediction, SimulatedStep, SimulationOptions
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search import SearchResult, search
from hpctrain.planner.search_space import AVERAGERS, SearchSpace
from hpctrain.trace.time_table import Row, TimeTable
from tests.support.nets import narrow, plain
from tests.support.planner_jobs import job_of, machine_of

MACHINE = machine_of(alpha_seconds=2e-6, bytes_per_second=1e8, ranks_per_node=2)
SecondsOf = Callable[[Candidate], float]


def searched(
    seconds_of: SecondsOf,
    space: SearchSpace | None = None,
    *,
    memory_of: Callable[[Candidate], int] = lambda candidate: 1 << 20,
    ranks: int = 4,
    job: Job | None = None,
    machine: Machine = MACHINE,
) -> tuple[SearchResult, list[Candidate]]:
    simulated: list[Candidate] = []

    def predicted(of: Job, candidate: Candidate, on: Machine, costs: ComputeCosts, options: SimulationOptions) -> Prediction:
        simulated.append(candidate)
        seconds = seconds_of(candidate)
        total = Row("total", "total", compute_seconds=seconds)
        table = TimeTable((replace(total, name="conv1", kind="layer"),), total, 0.0, seconds, seconds, 1, 0.0)
        return Prediction(SimulatedStep(seconds, table, {}), memory_of(candidate), 0, 0.0)

    job = job or job_of(plain(), (9, 7, 3), 8)
    return search(job, machine, RateCosts(machine), ranks, space, predicted_by=predicted), simulated


def by_grid(candidate: Candidate) -> float:
    return 1.0 / candidate.plan.rows + 0.01 * len(candidate.averager)


def test_the_best_is_the_fastest_of_the_simulated_ones() -> None:
    result, simulated = searched(by_grid)
    assert len(simulated) == len(result.choices) == SearchSpace().simulated
    assert all(simulated.count(candidate) == 1 for candidate in simulated)
    seconds = [choice.prediction.step.seconds for choice in result.choices]
    assert seconds == sorted(seconds)
    assert result.best.why == ""
    assert all(choice.why and choice.fits for choice in result.choices[1:])
    assert result.estimated >= len(simulated)


def test_several_grids_and_pure_batch_with_other_averagers_are_simulated() -> None:
    _, simulated = searched(by_grid)
    assert len({candidate.plan.rows for candidate in simulated}) > 1
    pure = [candidate for candidate in simulated if candidate.plan.rows == 1]
    assert len({(candidate.averager, *candidate.options) for candidate in pure}) >= 4
    _, more = searched(by_grid, SearchSpace(simulated=20))
    assert {candidate.averager for candidate in more if candidate.plan.rows == 1} == {choice.name for choice in AVERAGERS}


def test_what_is_fixed_stays() -> None:
    plan = ParallelPlan(2, 1, Parallelism.BATCH, {"conv*": Parallelism.DOMAIN})
    averager = AveragerChoice("bucketed", {"bucket_bytes": 512})
    space = SearchSpace(fixed_grid=(2, 2), fixed_plan=plan, fixed_averager=averager, fixed_micro_batches=2)
    result, simulated = searched(by_grid, space)
    assert simulated == [Candidate(replace(plan, rows=2, cols=2), "bucketed", {"bucket_bytes": 512}, 2)]
    assert result.best.candidate == simulated[0]


def test_more_ranks_than_samples_share_samples() -> None:
    result, simulated = searched(by_grid, ranks=16)
    assert all(candidate.plan.cols <= 8 for candidate in simulated)
    assert result.best.candidate.ranks == 16


def test_ranks_without_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="the nearest number of ranks that has a grid is 20"):
        searched(by_grid, ranks=23, job=job_of(narrow(), (5, 5, 3), 4))


def test_what_does_not_fit_comes_last_and_says_so() -> None:
    result, _ = searched(by_grid, memory_of=lambda one: 1 << 20 if one.plan.rows == 1 else 1 << 40)
    fits = [choice.fits for choice in result.choices]
    assert fits == sorted(fits, reverse=True)
    assert result.best.candidate.plan.rows == 1
    assert result.choices[-1].why == "does not fit: 1.02e+03 GiB of 16 GiB"


def test_lean_candidates_are_simulated_where_no_fast_one_fits() -> None:
    result, simulated = searched(by_grid, memory_of=lambda one: 1 << 20 if one.micro_batches > 1 else 1 << 40)
    assert result.best.fits
    assert result.best.candidate.micro_batches > 1
    assert {candidate.micro_batches for candidate in simulated} > {1}


def test_a_job_that_fits_nowhere_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        searched(by_grid, memory_of=lambda one: (40 + one.plan.rows - one.micro_batches) << 30)
    sentence = str(caught.value)
    assert sentence.startswith("net with a batch of 8 fits in no plan on 4 ranks of 16 GiB each; the least that would do is ")
    assert "with micro_batches 4" in sentence
    assert "\n" not in sentence


def test_micro_batches_are_estimated_where_bounds_say_that_nothing_else_fits() -> None:
    job = job_of("resnet20", (32, 32, 3), 256)
    small = replace(MACHINE, memory_bytes=60 << 20)
    _, simulated = searched(by_grid, job=job, machine=small, ranks=2)
    assert {candidate.micro_batches for candidate in simulated} > {1}
