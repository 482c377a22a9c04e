"""Searches against simulations that are made up: what is simulated, what wins, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpctrain.errors import ConfigError
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.sequential import Sequential
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
from tests.support.nets import plain
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
    assert SearchSpace().simulated <= len(simulated) == len(result.choices)
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
    assert len({candidate.averager for candidate in pure}) >= 3
    _, more = searched(by_grid, SearchSpace(simulated=20))
    assert {candidate.averager for candidate in more if candidate.plan.rows == 1} == {choice.name for choice in AVERAGERS}


def test_the_best_plan_is_simulated_with_all_averagers_and_its_averager_with_other_plans() -> None:
    def seconds_of(candidate: Candidate) -> float:
        return 0.5 + 0.1 * (candidate.plan.rows != 2) + (0.2 if candidate.averager == "blocking" else 0.3)

    result, simulated = searched(seconds_of, SearchSpace(simulated=4))
    assert (result.best.candidate.plan.rows, result.best.candidate.averager) == (2, "blocking")
    of_best = [candidate for candidate in simulated if candidate.plan == result.best.candidate.plan]
    assert {candidate.averager for candidate in of_best} == {choice.name for choice in AVERAGERS}


@pytest.mark.parametrize(("gain", "rows"), [(0.04, 1), (0.06, 4)])
def test_layers_are_split_for_more_than_predictions_may_be_wrong_by(gain: float, rows: int) -> None:
    result, _ = searched(
        lambda one: 1.0 + 0.001 * len(one.averager) if one.plan.rows == 1 else 1.0 - gain + 0.001 * (4 - one.plan.rows)
    )
    assert result.best.candidate.plan.rows == rows
    if rows == 1:
        assert len(result.best.candidate.averager) == min(map(len, (choice.name for choice in AVERAGERS)))
        assert "shorter" in result.choices[1].why
    assert all(choice.fits for choice in result.choices)


def test_options_that_change_nothing_are_not_simulated_twice() -> None:
    layer = Sequential({"conv": Conv2d(3, 8, 3), "avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(8, 3)})
    _, simulated = searched(
        by_grid, SearchSpace(simulated=30, averagers=AVERAGERS[:2]), ranks=2, job=job_of(layer, (9, 7, 3), 99)
    )
    pure = [candidate for candidate in simulated if candidate.plan.rows == 1 and candidate.micro_batches == 1]
    assert [candidate.averager for candidate in pure] == ["sharded"]


def test_what_is_fixed_stays() -> None:
    plan = ParallelPlan(2, 1, Parallelism.BATCH, {"conv*": Parallelism.DOMAIN})
    averager = AveragerChoice("bucketed", {"bucket_bytes": 512})
    space = SearchSpace(fixed_grid=(2, 2), fixed_plan=plan, fixed_averager=averager, fixed_micro_batches=2)
    result, simulated = searched(by_grid, space)
    assert simulated == [Candidate(replace(plan, rows=2, cols=2), "bucketed", {"bucket_bytes": 512}, 2)]
    assert result.best.candidate == simulated[0]


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
    job = job_of(plain(), (9, 7, 3), 4096)
    small = replace(MACHINE, memory_bytes=16 << 20)
    _, simulated = searched(by_grid, job=job, machine=small, ranks=2)
    assert {candidate.micro_batches for candidate in simulated} > {1}


def test_candidates_that_a_run_would_refuse_are_left_out() -> None:
    def refusing(candidate: Candidate) -> float:
        if candidate.averager != "bucketed":
            raise ConfigError("It does not fit.")
        return 1.0

    result, _ = searched(refusing)
    assert {choice.candidate.averager for choice in result.choices} == {"bucketed"}
    with pytest.raises(ConfigError, match="It does not fit"):
        searched(refusing, SearchSpace(fixed_averager=AveragerChoice("sharded")))


def test_the_simulator_agrees_with_the_bounds_that_slow_links_ask_for_split_linear_layers() -> None:
    """Large linear layers on slow links: batch parallelism alone moves their weights, which model parallelism does not."""
    layer = Sequential({"flatten": Flatten(), "fc1": Linear(192, 2048), "fc2": Linear(2048, 2048), "fc3": Linear(2048, 10)})
    slow = machine_of(alpha_seconds=1e-5, bytes_per_second=1e8)
    never = AveragerChoice("sharded", {"fc_exchange": "never"})
    result = search(job_of(layer, (8, 8, 3), 16), slow, RateCosts(slow), 4, SearchSpace(fixed_averager=never))
    assert result.best.candidate.plan.rows > 1
    assert result.best.candidate.plan.use_of("fc2") is Parallelism.MODEL
    assert result.best.prediction.memory_bytes < slow.memory_bytes
    pure = next(choice for choice in result.choices if choice.candidate.plan.rows == 1)
    assert pure.prediction.step.seconds > 2 * result.best.prediction.step.seconds
