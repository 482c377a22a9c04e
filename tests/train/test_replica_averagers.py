"""The averagers of a replica: one for each group of parameters; optimisers that fit; slices by parameter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.train.replica import StrategyFactory
from hpctrain.train.replica_averagers import slices_of
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
