"""Costs of segments add up to those of the graph that a rank runs under the same plan: operators, moves and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from hpctrain.backend.kernels.specs import BatchNormSpec
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.data.sampler import counts
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.compile.steps import make_steps
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.plan_reporter import report_plan
from hpctrain.parallel.split_group import SplitGroup
from hpctrain.planner.averaging_costs import AveragedParts
from hpctrain.planner.job import Job
from hpctrain.planner.layer_costs import SegmentCosts
from hpctrain.planner.machine import Machine
from hpctrain.planner.move_traffic import is_move
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.segments import segments
from tests.support.nets import plain, residual
from tests.support.planner_jobs import NoCompute, job_of, machine_of

B, M, D = Parallelism
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


def test_gradients_that_travel_hide_behind_those_of_weights() -> None:
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
