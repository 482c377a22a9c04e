"""What a search returns can be run: its candidates train as one rank does, whatever machine they were chosen for."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache, partial

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.experiment.averager import make_strategy
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.planner.compute_costs import ComputeCosts
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.machine import Machine
from hpctrain.planner.prediction import Prediction, SimulatedStep, SimulationOptions
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search import search
from hpctrain.planner.search_space import SearchSpace
from hpctrain.trace.time_table import Row, TimeTable
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets, planned
from tests.support.one_rank import one_group, train_alone
from tests.support.training import Result, Task, distance, train

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
            return train(task, comm, virtual_engine(comm), partial(make_strategy, candidate.averager, candidate.options))

        for result in run_virtual(ranks, program, seed=ranks):
            assert distance(result.parameters, _alone(net).parameters) < 1e-10, candidate
            assert distance(result.statistics, _alone(net).statistics) < 1e-10, candidate


def test_other_links_lead_to_other_plans() -> None:
    plans = {repr(one.plan) for link in LINKS for one in _candidates("plain", 4, *link)}
    assert len(plans) > 2
