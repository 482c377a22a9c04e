"""Searches: the grids and candidates that are looked at, what wins and why, and that a run can train it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import ConfigError
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Linear, Sequential
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.costs.compute_costs import ComputeCosts, RateCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.search.estimates import patterns
from hpctrain.planner.search.layer_costs import segments
from hpctrain.planner.search.search import SearchResult, reason, search
from hpctrain.planner.search.search_space import SearchSpace, grid_shapes, searched_averagers
from hpctrain.planner.simulation.tasks import Prediction, SimulatedStep, SimulationOptions
from hpctrain.trace.time_table import Row, TimeTable
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets, planned
from tests.support.nets import narrow, plain
from tests.support.one_rank import one_group, train_alone
from tests.support.simulated import job_of, machine_of
from tests.support.training import Result, Task, distance, train

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
    return 1.0 / candidate.plan.rows + 0.01 * len(candidate.averager.name)


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
    assert len({candidate.averager.name for candidate in pure}) >= 3
    _, more = searched(by_grid, SearchSpace(simulated=20))
    assert {candidate.averager.name for candidate in more if candidate.plan.rows == 1} == {
        choice.name for choice in searched_averagers()
    }


def test_the_best_plan_is_simulated_with_all_averagers_and_its_averager_with_other_plans() -> None:
    def seconds_of(candidate: Candidate) -> float:
        return 0.5 + 0.1 * (candidate.plan.rows != 2) + (0.2 if candidate.averager.name == "blocking" else 0.3)

    result, simulated = searched(seconds_of, SearchSpace(simulated=4))
    assert (result.best.candidate.plan.rows, result.best.candidate.averager.name) == (2, "blocking")
    of_best = [candidate for candidate in simulated if candidate.plan == result.best.candidate.plan]
    assert {candidate.averager.name for candidate in of_best} == {choice.name for choice in searched_averagers()}


@pytest.mark.parametrize(("gain", "rows"), [(0.04, 1), (0.06, 4)])
def test_layers_are_split_for_more_than_predictions_may_be_wrong_by(gain: float, rows: int) -> None:
    result, _ = searched(
        lambda one: 1.0 + 0.001 * len(one.averager.name) if one.plan.rows == 1 else 1.0 - gain + 0.001 * (4 - one.plan.rows)
    )
    assert result.best.candidate.plan.rows == rows
    if rows == 1:
        assert len(result.best.candidate.averager.name) == min(map(len, (choice.name for choice in searched_averagers())))
        assert "shorter" in result.choices[1].why
    assert all(choice.fits for choice in result.choices)


def test_options_that_change_nothing_are_not_simulated_twice() -> None:
    layer = Sequential({"conv": Conv2d(3, 8, 3), "avgpool": AdaptiveAveragePool(1), "flatten": Flatten(), "fc": Linear(8, 3)})
    _, simulated = searched(
        by_grid, SearchSpace(simulated=30, averagers=searched_averagers()[:2]), ranks=2, job=job_of(layer, (9, 7, 3), 99)
    )
    pure = [candidate for candidate in simulated if candidate.plan.rows == 1 and candidate.micro_batches == 1]
    assert [candidate.averager.name for candidate in pure] == ["sharded"]


def test_what_is_fixed_stays() -> None:
    plan = ParallelPlan(2, 1, Parallelism.BATCH, {"conv*": Parallelism.DOMAIN})
    averager = AveragerChoice("bucketed", {"bucket_bytes": 512})
    space = SearchSpace(fixed_grid=(2, 2), fixed_plan=plan, fixed_averager=averager, fixed_micro_batches=2)
    result, simulated = searched(by_grid, space)
    assert simulated == [Candidate(replace(plan, rows=2, cols=2), AveragerChoice("bucketed", {"bucket_bytes": 512}), 2)]
    assert result.best.candidate == simulated[0]


def test_what_does_not_fit_comes_last_and_says_so() -> None:
    result, _ = searched(by_grid, memory_of=lambda one: 1 << 20 if one.plan.rows == 1 else 1 << 40)
    fits = [choice.fits for choice in result.choices]
    assert fits == sorted(fits, reverse=True)
    assert result.best.candidate.plan.rows == 1
    assert result.choices[-1].why == "does not fit: needs 1.02e+03 GiB of 16 GiB"


def test_lean_candidates_are_simulated_where_no_fast_one_fits() -> None:
    result, simulated = searched(by_grid, memory_of=lambda one: 1 << 20 if one.micro_batches > 1 else 1 << 40)
    assert result.best.fits
    assert result.best.candidate.micro_batches > 1
    assert {candidate.micro_batches for candidate in simulated} > {1}


def test_a_job_that_fits_nowhere_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"does not fit in memory on 4 ranks .* with micro_batches 4"):
        searched(by_grid, memory_of=lambda one: (40 + one.plan.rows - one.micro_batches) << 30)


def test_micro_batches_are_estimated_where_bounds_say_that_nothing_else_fits() -> None:
    job = job_of(plain(), (9, 7, 3), 4096)
    small = replace(MACHINE, memory_bytes=16 << 20)
    _, simulated = searched(by_grid, job=job, machine=small, ranks=2)
    assert {candidate.micro_batches for candidate in simulated} > {1}


def test_candidates_that_a_run_would_refuse_are_left_out() -> None:
    def refusing(candidate: Candidate) -> float:
        if candidate.averager.name != "bucketed":
            raise ConfigError("It does not fit.")
        return 1.0

    result, _ = searched(refusing)
    assert {choice.candidate.averager.name for choice in result.choices} == {"bucketed"}
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


GRAPH = job_of("resnet20", (32, 32, 3), 4).graph_of(1)


def test_grids_are_all_divisors_that_leave_every_split_group_a_sample() -> None:
    assert grid_shapes(SearchSpace(), GRAPH, 12, 64) == ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1))
    assert grid_shapes(SearchSpace(), GRAPH, 12, 4) == ((3, 4), (4, 3), (6, 2), (12, 1))


def test_no_layer_is_split_into_more_parts_than_it_has() -> None:
    assert [rows for rows, _ in grid_shapes(SearchSpace(), GRAPH, 128, 999)] == [1, 2, 4, 8, 16, 32, 64]


def test_ranks_that_no_grid_serves_are_refused_with_the_nearest_number() -> None:
    graph = job_of(narrow(), (5, 5, 3), 4).graph_of(1)
    with pytest.raises(ConfigError, match="the nearest number of ranks with a grid is 20"):
        grid_shapes(SearchSpace(), graph, 23, 4)
    assert grid_shapes(SearchSpace(), graph, 20, 4)


def test_nothing_is_proposed_that_changes_the_optimisation() -> None:
    assert not {choice.name for choice in searched_averagers()} & {"lazy", "sparse"}
    assert not {option for choice in searched_averagers() for option in choice.options} & {"wire", "wire_parameters"}
    named = AveragerChoice("sharded", {"wire": "bfloat16"})
    assert SearchSpace(fixed_averager=named).averager_choices == (named,)


SMALL_MACHINE = machine_of(memory_bytes=8 << 30)


def prediction(*rows: Row, memory_bytes: int = 1 << 30, left_over: float = 0.0) -> Prediction:
    total = Row("total", "total", exposed_seconds=sum(row.exposed_seconds for row in rows))
    step = sum(row.compute_seconds + row.exposed_seconds for row in rows) + left_over
    return Prediction(SimulatedStep(step, TimeTable(rows, total, left_over, step, step, 1, 0.0), {}), memory_bytes, 0, 0.0)


FC = Row("fc6", "layer", compute_seconds=0.2, exposed_seconds=0.01)
CONV = Row("conv1", "layer", compute_seconds=0.3)
BEST = prediction(CONV, FC)


@pytest.mark.parametrize(
    ("worse", "sentence"),
    [
        (prediction(CONV, replace(FC, exposed_seconds=0.031)), "21 ms longer: 21 ms more exposed, most of it in fc6"),
        (prediction(replace(CONV, compute_seconds=0.9), FC), "0.6 s longer: 0.6 s more computed, most of it in conv1"),
        (prediction(CONV, FC, left_over=0.2), "0.2 s longer: 0.2 s more computed, most of it in the rest of the step"),
        (prediction(CONV, FC, Row("sums", "communication", exposed_seconds=0.5)), "0.5 s more exposed, most of it in sums"),
        (prediction(CONV, replace(FC, exposed_seconds=0.0101)), "as fast, within the accuracy of predictions"),
        (
            prediction(CONV, replace(FC, compute_seconds=0.19)),
            "10 ms shorter, within the error of predictions for split layers",
        ),
        (prediction(CONV, FC, memory_bytes=9 << 30), "does not fit: needs 9 GiB of 8 GiB"),
    ],
    ids=["exposed", "computed", "left over", "communication", "equal", "shorter", "memory"],
)
def test_the_reason_is_the_largest_part_of_what_is_longer(worse: Prediction, sentence: str) -> None:
    assert sentence in reason(BEST, worse, SMALL_MACHINE)


NETS = {"plain": nets.plain, "residual": nets.residual, "narrow": partial(nets.narrow, classes=5)}
#: bandwidth and latency of the machine, as many times as usual: what is chosen follows from them
LINKS = ((1e-3, 1.0), (1.0, 1.0), (10.0, 0.01))


def _task(net: str) -> Task:
    return Task(NETS[net], NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, batch=8, steps=3)


@cache
def _alone(net: str) -> Result:
    return train_alone(_task(net), one_group)


def _by_name(job: Job, candidate: Candidate, machine: Machine, costs: ComputeCosts, options: SimulationOptions) -> Prediction:
    """Some time of its own for each candidate: any of them may be the best."""
    seconds = 1.0 + zlib.crc32(repr(candidate).encode()) / (1 << 32)
    total = Row("total", "total", compute_seconds=seconds)
    return Prediction(SimulatedStep(seconds, TimeTable((), total, 0.0, seconds, seconds, 1, 0.0), {}), 1 << 20, 0, 0.0)


def _candidates(net: str, ranks: int, bandwidth: float, latency: float) -> list[Candidate]:
    machine = planned.machine().scaled(bandwidth=bandwidth, latency=latency)
    space = SearchSpace(fixed_micro_batches=1, simulated=5)
    result = search(planned.job_of(_task(net)), machine, RateCosts(machine), ranks, space, predicted_by=_by_name)
    return [choice.candidate for choice in result.choices]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("net", "ranks"), [("plain", 2), ("plain", 6), ("plain", 8), ("residual", 3), ("residual", 4), ("narrow", 8)]
)
def test_searched_candidates_train_as_one_rank_does(net: str, ranks: int) -> None:
    candidates = [one for link in LINKS for one in _candidates(net, ranks, *link)]
    for candidate in {repr(one): one for one in candidates}.values():
        assert candidate.ranks == ranks
        task = replace(_task(net), plan=candidate.plan)

        def program(comm: ThreadCommunicator, task: Task = task, candidate: Candidate = candidate) -> Result:
            return train(
                task, comm, virtual_engine(comm), AveragerChoice(candidate.averager.name, candidate.averager.options).strategy
            )

        for result in run_virtual(ranks, program, seed=ranks):
            assert distance(result.parameters, _alone(net).parameters) < 1e-10, candidate
            assert distance(result.statistics, _alone(net).statistics) < 1e-10, candidate


B, M, D = Parallelism


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["alexnet", "resnet20"])
def test_patterns_give_every_layer_its_use(model: str, seed: int) -> None:
    graph = job_of(model, (96, 96, 3), 1, {"width": 0.1}).graph_of(1)
    draw = random.Random(seed)
    uses = {}
    for piece in segments(graph):
        use = draw.choice(list(Parallelism))
        uses.update({node.name: use for node in piece.nodes(graph)})
    default, rules = patterns(uses)
    plan = ParallelPlan(2, 1, default, rules)
    plan.check(list(uses))
    assert {name: plan.use_of(name) for name in uses} == uses
    assert len(rules) < len(uses)


def test_patterns_are_few() -> None:
    names = [f"features.{k}" for k in range(9)]
    assert patterns(dict.fromkeys(names, D)) == (D, {})
    classifier = [f"classifier.{k}" for k in range(3)]
    default, rules = patterns({**dict.fromkeys(names, D), "flatten": B, **dict.fromkeys(classifier, M)})
    assert (default, rules) == (D, {"flatten": B, "classifier.*": M})


def test_a_layer_with_layers_below_it_has_a_rule_of_its_own() -> None:
    uses = {"block": M, "block.a": B, "block.b": B, "other": B}
    default, rules = patterns(uses)
    plan = ParallelPlan(2, 1, default, rules)
    assert {name: plan.use_of(name) for name in uses} == uses
