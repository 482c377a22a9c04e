"""The averagers of a replica: one for each group of parameters; optimisers that fit; slices by parameter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import BackendError
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.train.replica import StrategyFactory
from hpctrain.train.replica_averagers import slices_of, usable
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, replica_of

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=1)


@pytest.mark.parametrize("strategy", [Blocking, Sharded])
@pytest.mark.parametrize("plan", [ParallelPlan(1, 2), ParallelPlan(2, 2, Parallelism.MODEL)], ids=str)
def test_each_group_has_an_averager_whose_slices_hold_all_its_parameters(strategy: StrategyFactory, plan: ParallelPlan) -> None:
    def program(comm: ThreadCommunicator) -> tuple[set[str], set[str], dict[str, list[int]]]:
        replica = replica_of(replace(TASK, plan=plan), comm, virtual_engine(comm), strategy)
        several = [averager for averager in replica.averagers.values() if averager.comm.size > 1]
        names = {name for averager in several for name in averager.group.parameters}
        return set(replica.averagers) ^ set(replica.network.groups), names, slices_of(replica.averagers)

    for missing, names, slices in run_virtual(plan.rows * plan.cols, program):
        assert not missing
        assert set(slices) == names
        assert sorted({number for held in slices.values() for number in held}) == list(range(1 + max(map(max, slices.values()))))


def test_a_rank_alone_has_no_slices() -> None:
    def program(comm: ThreadCommunicator) -> dict[str, list[int]]:
        return slices_of(replica_of(TASK, comm, virtual_engine(comm), Sharded).averagers)

    assert run_virtual(1, program) == [{}]


@pytest.mark.parametrize(("on_host", "any_arrays", "fits"), [(True, False, True), (False, True, True), (False, False, False)])
def test_an_optimizer_of_the_host_is_refused_elsewhere(on_host: bool, any_arrays: bool, fits: bool) -> None:
    kernels = SimpleNamespace(name="cuda", arithmetic=SimpleNamespace(on_host=on_host))
    network = cast(Any, SimpleNamespace(kernels=kernels))
    optimizer = cast(Any, type("Sgd", (), {"any_arrays": any_arrays})())
    if fits:
        assert usable(optimizer, network) is optimizer
        return
    with pytest.raises(BackendError, match="Sgd computes with NumPy, which does not reach arrays of backend cuda"):
        usable(optimizer, network)
