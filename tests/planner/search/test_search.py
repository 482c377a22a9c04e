"""Searches: grids and candidates, what wins and why, and that a run can train it; and lower bounds, paths and estimates."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import pytest

from hpctrain.assembly.recipe import statistics_words
from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import AddSpec, BatchNormSpec, Conv2dSpec, LinearSpec
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import ConfigError
from hpctrain.data.sampler import counts
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.compile.steps import make_steps
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Layer, Linear, ReLU, Residual, Sequential
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import SplitGroup
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.plan_report import report_plan
from hpctrain.planner.costs.compute_costs import ComputeCosts, RateCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.costs.operator_work import is_move
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.search.advantage import advantage
from hpctrain.planner.search.averaging_costs import AveragedParts
from hpctrain.planner.search.estimates import Estimate, GridEstimates, patterns, unsplit_plan
from hpctrain.planner.search.layer_costs import SegmentCosts, segments
from hpctrain.planner.search.search import SearchResult, search
from hpctrain.planner.search.search_space import SearchSpace, grid_shapes, searched_averagers
from hpctrain.planner.search.shortest_path import Costs, Edge, lower_bound, shortest_paths, unbeaten
from hpctrain.planner.simulation.tasks import Prediction, SimulationOptions
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets, planned
from tests.support.nets import narrow, plain, residual
from tests.support.one_rank import one_group, train_alone
from tests.support.predictions import prediction
from tests.support.simulated import NoCompute, job_of, machine_of
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
        return prediction(seconds_of(candidate), memory_bytes=memory_of(candidate))

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
    assert Candidate(ParallelPlan(1, 4)) in simulated
    assert len({candidate.plan.rows for candidate in simulated}) > 1
    assert all(choice.fits for choice in result.choices)
    assert result.estimated >= len(simulated)


def test_the_best_plan_is_simulated_with_all_averagers_and_its_averager_with_other_plans() -> None:
    def seconds_of(candidate: Candidate) -> float:
        return 0.5 + 0.1 * (candidate.plan.rows != 2) + (0.2 if candidate.averager.name == "blocking" else 0.3)

    result, simulated = searched(seconds_of, SearchSpace(simulated=4))
    assert (result.best.candidate.plan.rows, result.best.candidate.averager.name) == (2, "blocking")
    of_best = [candidate for candidate in simulated if candidate.plan == result.best.candidate.plan]
    assert {candidate.averager.name for candidate in of_best} == {choice.name for choice in searched_averagers()}


@pytest.mark.parametrize(
    ("priority", "split", "rows", "averager"),
    [(0.97, 0.96, 1, "sharded"), (0.94, 0.92, 1, "priority"), (0.98, 0.92, 2, "sharded"), (0.94, 0.88, 2, "sharded")],
)
def test_a_choice_is_left_for_more_than_predictions_may_be_wrong_by(
    priority: float, split: float, rows: int, averager: str
) -> None:
    def seconds_of(one: Candidate) -> float:
        pure = {"sharded": 1.0, "priority": priority}.get(one.averager.name, 2.0)
        return pure if one.plan.rows == 1 else split if one.plan.rows == 2 else 3.0

    best = searched(seconds_of)[0].best.candidate
    assert (best.plan.rows, best.averager.name) == (rows, averager)


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_decide_between_equal_candidates(seed: int) -> None:
    draw = random.Random(seed)

    def seconds_of(one: Candidate) -> float:
        slower = 0.2 if one.averager == AveragerChoice() else random.Random(f"{seed} {one}").choice((0.0, 0.02))
        return (1.0 + slower) * (1 + draw.uniform(-0.002, 0.002))

    space = SearchSpace(fixed_grid=(2, 2), fixed_plan=ParallelPlan(2, 2, Parallelism.MODEL), fixed_micro_batches=1)
    assert len({searched(seconds_of, space)[0].best.candidate.averager.name for _ in range(5)}) == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_default_is_left_only_for_a_gain(seed: int) -> None:
    bandwidth = 10 ** random.Random(seed).uniform(-3, 1)
    machine = planned.machine().scaled(bandwidth=bandwidth)
    result = search(planned.job_of(_task("plain")), machine, RateCosts(machine), 4, SearchSpace(fixed_micro_batches=1))
    assert result.default is not None
    best, default = result.best.prediction.step.seconds, result.default.prediction.step.seconds
    assert result.best is result.default or best * 1.05 <= default
    fastest = min(choice.prediction.step.seconds for choice in result.choices)
    assert best <= fastest * 1.05 * (1 + 1e-9)


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


def test_only_given_uses_are_searched_on_grids_that_have_some() -> None:
    given = frozenset({(2, Parallelism.BATCH), (2, Parallelism.MODEL)})
    result, simulated = searched(by_grid, SearchSpace(uses=given))
    assert {candidate.plan.rows for candidate in simulated} == {1, 2}
    assert result.best.candidate.plan.rows == 2
    assert Parallelism.DOMAIN not in {use for one in simulated for use in (one.plan.default, *one.plan.use.values())}


def test_what_does_not_fit_comes_last() -> None:
    result, _ = searched(by_grid, memory_of=lambda one: 1 << 20 if one.plan.rows == 1 else 1 << 40)
    fits = [choice.fits for choice in result.choices]
    assert fits == sorted(fits, reverse=True)
    assert result.best.candidate.plan.rows == 1


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


def test_slow_links_ask_for_split_linear_layers_whose_gradients_need_not_travel() -> None:
    """Large linear layers on slow links: batch parallelism alone moves their weights, which model parallelism does not."""
    layer = Sequential({"flatten": Flatten(), "fc1": Linear(192, 2048), "fc2": Linear(2048, 2048), "fc3": Linear(2048, 10)})
    slow = machine_of(alpha_seconds=1e-5, bytes_per_second=1e8)
    never = AveragerChoice("sharded", {"fc_exchange": "never"})
    job = job_of(layer, (8, 8, 3), 16)
    result = search(job, slow, RateCosts(slow), 4, SearchSpace(fixed_averager=never))
    assert result.best.candidate.plan.rows > 1
    assert result.best.candidate.plan.use_of("fc2") is Parallelism.MODEL
    assert result.best.prediction.memory_bytes < slow.memory_bytes
    pure = next(choice for choice in result.choices if choice.candidate.plan.rows == 1)
    assert pure.seconds > 2 * result.best.seconds
    words = advantage(job, result, slow)
    assert "times as fast as averaging alone" in words
    assert "of fc2's gradients need not travel" in words
    fast = replace(slow, ranks_per_node=4)
    assert advantage(job, search(job, fast, RateCosts(fast), 4), fast)


GRAPH = job_of("resnet20", (32, 32, 3), 4).graph_of(1)


def test_grids_are_all_divisors_that_leave_every_split_group_a_sample_and_some_layer_enough_parts() -> None:
    assert grid_shapes(SearchSpace(), GRAPH, 12, 64) == ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1))
    assert grid_shapes(SearchSpace(), GRAPH, 12, 4) == ((3, 4), (4, 3), (6, 2), (12, 1))
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
    return prediction(1.0 + zlib.crc32(repr(candidate).encode()) / (1 << 32))


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
    default, rules = patterns({"block": M, "block.a": B, "block.b": B, "other": B})  # a layer with layers below it
    assert (default, rules) == (B, {"block": M})


@pytest.mark.parametrize(
    ("model", "count"), [("alexnet", 8), ("vgg16", 16), ("resnet18", 10), ("resnet152", 52), ("resnet20", 11)]
)
def test_segments_are_layers_with_weights_and_blocks(model: str, count: int) -> None:
    graph = job_of(model, (96, 96, 3), 1, {"width": 0.1}).graph_of(1)
    pieces = segments(graph)
    assert len(pieces) == count
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == len(graph.nodes)
    for piece in pieces:
        nodes = piece.nodes(graph)
        assert any(isinstance(node.spec, Conv2dSpec | LinearSpec) for node in nodes)
        made = {piece.source, *(node.output for node in nodes)}
        assert all(tensor in made for node in nodes for tensor in node.inputs)
        outside = [node for node in graph.nodes if node not in nodes and made & set(node.inputs) - {piece.source}]
        assert all(set(node.inputs) & made <= {piece.output} for node in outside)
        sums = sum(isinstance(node.spec, AddSpec) for node in nodes)
        assert sums <= 1


STATES, LAYERS = "ab", 5


def network(seed: int, costs: int) -> dict[tuple[int, str], list[Edge[str, str]]]:
    draw = random.Random(seed)
    return {
        (layer, state): [
            Edge(f"{layer}{state}{number}", tuple(float(draw.randrange(9)) for _ in range(costs)), draw.choice(STATES))
            for number in range(3)
        ]
        for layer in range(LAYERS)
        for state in STATES
    }


def all_paths(edges: dict[tuple[int, str], list[Edge[str, str]]]) -> dict[tuple[str, ...], Costs]:
    paths = {}
    for numbers in itertools.product(range(3), repeat=LAYERS):
        state, choices, sums = "a", [], None
        for layer, number in enumerate(numbers):
            edge = edges[layer, state][number]
            choices.append(edge.choice)
            sums = edge.costs if sums is None else tuple(map(sum, zip(sums, edge.costs, strict=True)))
            state = edge.state
        assert sums is not None
        paths[tuple(choices)] = sums
    return paths


@pytest.mark.parametrize("costs", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_paths_are_those_of_brute_force(seed: int, costs: int) -> None:
    edges = network(seed, costs)
    everything = all_paths(edges)
    best = shortest_paths(LAYERS, "a", lambda layer, state: edges[layer, state], most=10_000)
    assert {path.costs for path in best} == set(unbeaten(list(everything.values()), lambda one: one))
    assert [path.costs for path in best] == sorted(path.costs for path in best)
    for path in best:
        assert everything[path.choices] == path.costs
    for rule in (max, sum, lambda costs: max(costs[0], costs[-1] + costs[0] / 3)):  # each rises with all costs
        assert min(rule(path.costs) for path in best) == min(map(rule, everything.values()))


def test_hopeless_paths_are_left_out() -> None:
    edges = network(0, 1)
    best = shortest_paths(LAYERS, "a", lambda layer, state: edges[layer, state], hopeless=lambda layer, costs: costs[0] > 0)
    assert all(path.costs == (0.0,) for path in best)


def test_no_more_paths_are_kept_than_asked_for() -> None:
    line = {(layer, "a"): [Edge(k, (float(k), float(9 - k)), "a") for k in range(10)] for layer in range(3)}
    assert len(shortest_paths(3, "a", lambda layer, state: line[layer, state], most=4)) <= 4


def test_bounds_hold_for_every_path() -> None:
    draw = random.Random(3)
    edges = {
        (layer, state): [Edge("", (draw.random(), draw.random()), draw.choice("ab")) for _ in range(3)]
        for layer in range(6)
        for state in "ab"
    }
    bound = lower_bound(edges, 6, 2)
    for _ in range(100):
        state, begun = draw.choice("ab"), [(0.0, 0.0)]
        for layer in range(6):
            edge = draw.choice(edges[layer, state])
            begun.append((begun[-1][0] + edge.costs[0], begun[-1][1] + edge.costs[1]))
            state = edge.state
        for layer, costs in enumerate(begun):
            for dim, end in enumerate(begun[-1]):
                assert bound(layer, costs)[dim] <= end + 1e-12
    least = [min(edge.costs[1] for state in "ab" for edge in edges[layer, state]) for layer in range(6)]
    assert bound(2, (0.0, 1.0))[1] == pytest.approx(1.0 + sum(least[2:]))


PLANS: Mapping[str, tuple[str, Mapping[str, Parallelism]]] = {
    "batch": ("plain", {}),
    "mixed": ("plain", {"conv*": D, "relu1": D, "pool1": D, "fc1": M, "relu3": M}),
    "model": ("plain", {"*": M}),
    "blocks": ("residual", {"*": D, "fc*": M}),
    "resnet": ("resnet20", {"*": D, "layer2.*": M, "fc": B}),
}
FREE_LINKS = machine_of(alpha_seconds=0.0, bytes_per_second=math.inf)


def job_named(name: str) -> Job:
    models = {
        "plain": (plain(dropout=0.5), (9, 7, 3)),
        "residual": (residual(), (12, 9, 3)),
        "resnet20": ("resnet20", (16, 16, 3)),
    }
    model, shape = models[name]
    return job_of(model, shape, 7, {"width": 0.25} if isinstance(model, str) else None)


def uses_of(job: Job, patterns: Mapping[str, Parallelism]) -> ParallelPlan:
    """With one use for all of a segment."""
    plan = ParallelPlan(3, 1, B, patterns)
    graph = job.graph_of(1)
    use = {node.name: plan.use_of(piece.nodes(graph)[0].name) for piece in segments(graph) for node in piece.nodes(graph)}
    return ParallelPlan(3, 1, B, use)


def summed(
    job: Job, machine: Machine, plan: ParallelPlan, costs: RateCosts | NoCompute
) -> tuple[float, AveragedParts, AveragedParts]:
    prices = SegmentCosts(job, machine, costs, plan)
    layout: Layout | None = None
    seconds, whole, split = 0.0, AveragedParts(), AveragedParts()
    for piece in segments(prices.graph):
        cost = prices.cost(piece, layout, plan.use_of)
        layout, seconds, whole, split = cost.output, seconds + cost.seconds, whole + cost.whole, split + cost.split
    return seconds, whole, split


@pytest.mark.parametrize("name", PLANS)
def test_seconds_are_those_of_the_partitioned_graphs_operators(name: str) -> None:
    model, patterns = PLANS[name]
    job = job_named(model)
    plan, costs = uses_of(job, patterns), RateCosts(FREE_LINKS)
    graph = partition_graph(job.graph_of(7), plan, counts(7, 3)).local(1, _group())
    steps = make_steps(job.kernels.fuse(graph, training=True), job.kernels, training=True, input_gradient=False)
    expected = 0.0
    for k, step in enumerate(steps.steps):
        expected += costs.seconds(step, Action.FORWARD)
        expected += costs.seconds(step, Action.PARAMETERS) if step.has_parameters else 0.0
        expected += costs.seconds(step, Action.INPUT) if steps.passes_back(k) else 0.0
        expected += costs.seconds(step, Action.RECOMPUTE) if is_move(step.operator) and step.recomputes_output else 0.0
    assert summed(job, FREE_LINKS, plan, costs)[0] == pytest.approx(expected)


def _group() -> SplitGroup:
    return SplitGroup(SingleCommunicator("split"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))


@pytest.mark.parametrize("name", PLANS)
def test_parameters_are_those_of_the_first_rank(name: str) -> None:
    model, patterns = PLANS[name]
    job = job_named(model)
    plan = uses_of(job, patterns)
    shapes = {parameter: spec.shape for parameter, spec in job.specs.items()}
    report = report_plan(job.graph_of, plan, counts(7, 3), shapes)
    held = {group.name: group.elements[0] for group in report.groups}
    _, whole, split = summed(job, FREE_LINKS, plan, NoCompute())
    assert {"all": whole.elements, "model": split.elements} == {"all": 0, "model": 0, **held}


def test_moves_and_merged_statistics_take_time_on_slow_links() -> None:
    job = job_named("residual")
    plan = uses_of(job, {"*": D})
    slow = machine_of(alpha_seconds=1e-3)
    halos, _, _ = summed(job, slow, plan, NoCompute())
    norms = sum(isinstance(node.spec, BatchNormSpec) for node in job.graph_of(1).nodes)
    assert halos > 2 * norms * 1e-3
    assert summed(job, slow, ParallelPlan(1, 3), NoCompute())[0] == pytest.approx(2 * norms * 2e-3, rel=0.02)


def test_gradients_that_travel_are_hidden_by_those_of_weights() -> None:
    job = job_named("plain")
    plan, fast_compute = uses_of(job, {"fc2": M, "fc1": M}), machine_of(alpha_seconds=0.0, bytes_per_second=1e6)
    alone = summed(job, fast_compute, plan, NoCompute())[0] + summed(job, FREE_LINKS, plan, RateCosts(fast_compute))[0]
    assert summed(job, fast_compute, plan, RateCosts(fast_compute))[0] < alone


def test_micro_batches_take_as_many_passes() -> None:
    job = job_named("plain")
    machine = machine_of()
    whole, parts = (SegmentCosts(job, machine, RateCosts(machine), ParallelPlan(), micro) for micro in (1, 3))
    assert parts.graph.tensors[0].shape[0] == 3
    piece = segments(whole.graph)[0]
    costs = [prices.cost(piece, None, lambda name: B) for prices in (whole, parts)]
    assert costs[1].seconds > costs[0].seconds
    assert costs[1].memory_bytes < costs[0].memory_bytes


def test_segments_of_a_kind_are_priced_once() -> None:
    job = job_named("resnet20")
    prices = SegmentCosts(job, FREE_LINKS, RateCosts(FREE_LINKS), ParallelPlan())
    pieces = segments(prices.graph)
    first = prices.cost(pieces[0], None, lambda name: B)
    same = [prices.cost(piece, first.output, lambda name: B) for piece in pieces[2:4]]
    assert same[0] is same[1]


def chain() -> Layer:
    """Two convolutions, the second with many channels, and two linear layers, the first of them large. For 16 x 12 x 3."""
    return Sequential(
        {
            "conv1": Conv2d(3, 8, 5, 2, padding=2),
            "relu1": ReLU(),
            "conv2": Conv2d(8, 64, 3, padding=1),
            "relu2": ReLU(),
            "avgpool": AdaptiveAveragePool(4),
            "flatten": Flatten(),
            "fc1": Linear(1024, 256),
            "relu3": ReLU(),
            "fc2": Linear(256, 10),
        }
    )


def blocks() -> Layer:
    """A stem, two residual blocks and a linear layer. For 16 x 12 x 3."""

    def block(channels: int, shortcut: Layer | None = None, channels_in: int | None = None) -> Layer:
        body = {"conv1": Conv2d(channels_in or channels, channels, 3, padding=1), "relu1": ReLU()}
        return Residual({**body, "conv2": Conv2d(channels, channels, 3, padding=1)}, shortcut, activation=ReLU())

    return Sequential(
        {
            "stem": Conv2d(3, 8, 3, padding=1),
            "block1": block(8),
            "block2": block(32, Conv2d(8, 32, 1), 8),
            "avgpool": AdaptiveAveragePool(1),
            "flatten": Flatten(),
            "fc": Linear(32, 400),
        }
    )


# One for each rule of what hides.
PROTOCOLS = tuple(map(AveragerChoice, ("sharded", "bucketed", "blocking")))
SEGMENT_NETS = {"chain": chain, "blocks": blocks}
# Links by far faster, about as fast and by far slower than the rest.
RATES = {"fast": (1e-8, 1e12), "middle": (2e-6, 3e8), "slow": (1e-5, 1e6)}


def problem(net: str, rate: str, batch: int = 8, **changes: int) -> tuple[Job, Machine]:
    alpha_seconds, bytes_per_second = RATES[rate]
    machine = machine_of(alpha_seconds=alpha_seconds, bytes_per_second=bytes_per_second, ranks_per_node=2)
    return job_of(SEGMENT_NETS[net](), (16, 12, 3), batch), replace(machine, **changes)


def everything(grid: GridEstimates, choice: AveragerChoice, rows: int) -> Iterator[Estimate]:
    uses = tuple(Parallelism) if rows > 1 else (Parallelism.BATCH,)
    for combination in itertools.product(uses, repeat=len(grid.uses_of(ParallelPlan()))):
        yield grid.of_uses(choice, combination)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("net", SEGMENT_NETS)
def test_no_uses_on_any_grid_beat_those_that_are_found(net: str, rate: str) -> None:
    job, machine = problem(net, rate)
    for shape in grid_shapes(SearchSpace(), job.graph_of(1), 4, job.batch):
        grid = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), shape)
        for choice in PROTOCOLS:
            best = grid.best(choice)[0]
            assert best.seconds == pytest.approx(min(one.seconds for one in everything(grid, choice, shape[0])), rel=1e-9)
            assert grid.best(choice, best.seconds)[0].seconds == pytest.approx(best.seconds)  # an incumbent as good
            assert not grid.best(choice, best.seconds / 2)


@pytest.mark.parametrize("net", SEGMENT_NETS)
def test_no_uses_that_fit_beat_those_that_are_found(net: str) -> None:
    job, machine = problem(net, "middle")
    grid = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), (4, 1))
    choice = searched_averagers()[0]
    known = sorted(everything(grid, choice, 4), key=lambda one: one.memory_bytes)
    assert known[0].memory_bytes < known[-1].memory_bytes
    for limit in {int(known[k].memory_bytes) + 1 for k in (0, len(known) // 3, len(known) // 2)}:
        small = GridEstimates(job, replace(machine, memory_bytes=limit), RateCosts(machine), SearchSpace(), (4, 1))
        best = small.best(choice)[0]
        assert best.memory_bytes <= limit
        assert best.seconds == pytest.approx(min(one.seconds for one in known if one.memory_bytes <= limit), rel=1e-9)
    assert grid.leanest(choice).memory_bytes == pytest.approx(known[0].memory_bytes)
    assert not GridEstimates(job, replace(machine, memory_bytes=9), RateCosts(machine), SearchSpace(), (4, 1)).best(choice)


def test_a_fixed_plan_keeps_its_uses_on_every_grid() -> None:
    job, machine = problem("chain", "middle")
    fixed = ParallelPlan(2, 1, Parallelism.DOMAIN, {"fc*": Parallelism.MODEL})
    space = SearchSpace(fixed_plan=fixed)
    (estimate,) = GridEstimates(job, machine, RateCosts(machine), space, (4, 1)).best(searched_averagers()[0])
    assert estimate.candidate.plan == replace(fixed, rows=4, cols=1)
    (estimate,) = GridEstimates(job, machine, RateCosts(machine), space, (2, 2)).best(searched_averagers()[0])
    assert estimate.candidate.plan == replace(fixed, rows=2, cols=2)
    assert unsplit_plan(space, (1, 4)) == ParallelPlan(1, 4)
    free = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), (4, 1)).best(searched_averagers()[0])[0]
    assert free.seconds <= estimate.seconds


def test_the_papers_network_is_no_slower_than_in_the_paper() -> None:
    """AlexNet, 512 ranks, 2048 samples, 2 us, 6 GB/s: 11.2 ms by blocking sums; and pure batch takes what its formula says."""
    job, machine = job_of("alexnet", (227, 227, 3), 2048), machine_of(alpha_seconds=2e-6, bytes_per_second=6e9)
    blocking = AveragerChoice("blocking")
    of_grids = {
        rows: GridEstimates(job, machine, NoCompute(), SearchSpace(), (rows, 512 // rows)).best(blocking)[0]
        for rows in (1, 16, 32)
    }
    assert of_grids[1].seconds == pytest.approx(83.3e-3, rel=0.01)
    assert min(one.seconds for one in of_grids.values()) <= 11.2e-3
    assert of_grids[32].candidate.plan.use_of("classifier.1") is Parallelism.MODEL
    assert of_grids[32].candidate.plan.use_of("features.6") is Parallelism.BATCH


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ParallelPlan(1, 4), "2 samples"),
        (
            ParallelPlan(2, 2, Parallelism.BATCH, {"layer3.*": Parallelism.MODEL}),
            "2 samples in 13 layers and over 4 samples in 6 layers",
        ),
        (ParallelPlan(2, 2, Parallelism.DOMAIN), "4 samples"),
    ],
)
def test_split_layers_take_batch_statistics_over_the_samples_of_their_group(plan: ParallelPlan, words: str) -> None:
    assert statistics_words(plan, GRAPH, batch=8) == f"batch norm takes its statistics over {words}"
