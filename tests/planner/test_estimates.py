"""The uses that are found have the least lower bound of all uses there are, under the memory that ranks have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.averaging_costs import AveragerChoice
from hpctrain.planner.estimates import Estimate, GridEstimates, unsplit_plan
from hpctrain.planner.job import Job
from hpctrain.planner.machine import Machine
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search_space import AVERAGERS, SearchSpace, grid_shapes
from tests.support.planner_jobs import NoCompute, job_of, machine_of


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
NETS = {"chain": chain, "blocks": blocks}
# Links by far faster, about as fast and by far slower than the rest.
RATES = {"fast": (1e-8, 1e12), "middle": (2e-6, 3e8), "slow": (1e-5, 1e6)}


def problem(net: str, rate: str, batch: int = 8, **changes: int) -> tuple[Job, Machine]:
    alpha_seconds, bytes_per_second = RATES[rate]
    machine = machine_of(alpha_seconds=alpha_seconds, bytes_per_second=bytes_per_second, ranks_per_node=2)
    return job_of(NETS[net](), (16, 12, 3), batch), replace(machine, **changes)


def everything(grid: GridEstimates, choice: AveragerChoice, rows: int) -> Iterator[Estimate]:
    uses = tuple(Parallelism) if rows > 1 else (Parallelism.BATCH,)
    for combination in itertools.product(uses, repeat=grid.segment_count):
        yield grid.of_uses(choice, combination)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("net", NETS)
def test_no_uses_on_any_grid_beat_those_that_are_found(net: str, rate: str) -> None:
    job, machine = problem(net, rate)
    for shape in grid_shapes(SearchSpace(), job.graph_of(1), 4, job.batch):
        grid = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), shape)
        for choice in PROTOCOLS:
            best = grid.best(choice)[0]
            assert best.seconds == pytest.approx(min(one.seconds for one in everything(grid, choice, shape[0])), rel=1e-9)


@pytest.mark.parametrize("net", NETS)
def test_no_uses_that_fit_beat_those_that_are_found(net: str) -> None:
    job, machine = problem(net, "middle")
    grid = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), (4, 1))
    choice = AVERAGERS[0]
    known = sorted(everything(grid, choice, 4), key=lambda one: one.memory_bytes)
    assert known[0].memory_bytes < known[-1].memory_bytes
    for limit in {int(known[k].memory_bytes) + 1 for k in (0, len(known) // 3, len(known) // 2)}:
        small = GridEstimates(job, replace(machine, memory_bytes=limit), RateCosts(machine), SearchSpace(), (4, 1))
        best = small.best(choice)[0]
        assert best.memory_bytes <= limit
        assert best.seconds == pytest.approx(min(one.seconds for one in known if one.memory_bytes <= limit), rel=1e-9)
    assert grid.leanest(choice).memory_bytes == pytest.approx(known[0].memory_bytes)
    assert not GridEstimates(job, replace(machine, memory_bytes=9), RateCosts(machine), SearchSpace(), (4, 1)).best(choice)


def test_an_incumbent_prunes_nothing_that_beats_it() -> None:
    job, machine = problem("chain", "middle")
    grid = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), (2, 2))
    for choice in AVERAGERS:
        best = grid.best(choice)[0]
        assert grid.best(choice, best.seconds)[0].seconds == pytest.approx(best.seconds)
        assert not grid.best(choice, best.seconds / 2)


def test_a_fixed_plan_keeps_its_uses_on_every_grid() -> None:
    job, machine = problem("chain", "middle")
    fixed = ParallelPlan(2, 1, Parallelism.DOMAIN, {"fc*": Parallelism.MODEL}, overlapped=frozenset({"conv2"}))
    space = SearchSpace(fixed_plan=fixed)
    (estimate,) = GridEstimates(job, machine, RateCosts(machine), space, (4, 1)).best(AVERAGERS[0])
    assert estimate.candidate.plan == replace(fixed, rows=4, cols=1)
    assert unsplit_plan(space, (1, 4)) == ParallelPlan(1, 4)
    free = GridEstimates(job, machine, RateCosts(machine), SearchSpace(), (4, 1)).best(AVERAGERS[0])[0]
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
