"""Split layers beside every averaging strategy, scheduled adversarially: no deadlock, and the result of one rank.

Runs HPCTRAIN_GRID_SEEDS seeds of each strategy on each grid (`make grid-seeds`: 20, which is 200 in all).
"""

import os
from dataclasses import replace
from functools import lru_cache, partial

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.grid_matrix import alone
from tests.support.training import Result, Task, distance, train

SEEDS = int(os.environ.get("HPCTRAIN_GRID_SEEDS", "1"))
GRIDS = [(2, 2), (3, 2)]
_D, _M, _B = Parallelism.DOMAIN, Parallelism.MODEL, Parallelism.BATCH
NETS = {
    "plain": (partial(nets.plain, dropout=0.3), {"conv2": _M, "relu2": _M, "fc1": _M, "relu3": _B, "fc2": _M}),
    "residual": (nets.residual, {"layer2.*": _M, "fc": _M}),
}


def _task(net: str) -> Task:
    """9 x 7 images; five samples a step, then four: on six ranks some have none."""
    optimizer = partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2)
    return Task(NETS[net][0], NumpyKernelSet(), optimizer, samples=9, batch=5, steps=4)


@lru_cache
def _expected(net: str) -> Result:
    return alone(_task(net))


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("strategy", ["blocking", *STRATEGIES])
def test_every_strategy_beside_model_and_domain(strategy: str, grid: tuple[int, int]) -> None:
    kind, options = (Blocking, {}) if strategy == "blocking" else STRATEGIES[strategy]
    rows, cols = grid
    for seed in range(SEEDS):
        net = tuple(NETS)[seed % 2] if SEEDS > 1 else ("plain" if rows == 2 else "residual")
        layers = frozenset({"conv1", "layer1.conv1", "layer1.conv2"} if seed % 3 == 0 else ())
        task = replace(_task(net), plan=ParallelPlan(rows, cols, _D, NETS[net][1], overlapped=layers))

        def program(comm: ThreadCommunicator, task: Task = task) -> Result:
            return train(task, comm, virtual_engine(comm), kind, **options)

        for result in run_virtual(rows * cols, program, seed=1000 * rows + seed, deadline_seconds=120):
            assert distance(result.parameters, _expected(net).parameters) < 1e-10, f"{net}, seed {seed}"
            if result.statistics:
                assert distance(result.statistics, _expected(net).statistics) < 1e-10, f"{net}, seed {seed}"


OPTIMIZERS = {
    "lars, clipping": partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5),
    "clipping": partial(Sgd, momentum=0.9, nesterov=True, clip_norm=0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Blocking, Sharded])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_norms_of_split_parameters_are_those_of_the_whole(optimizer: str, kind: type[Strategy]) -> None:
    """Layer by layer, and of all gradients; with all layers split, some, and none."""
    for net, (model, mixed) in NETS.items():
        task = Task(model, NumpyKernelSet(), OPTIMIZERS[optimizer], samples=9, batch=5, steps=4)
        expected = alone(task)
        for plan in (ParallelPlan(2, 2, _M), ParallelPlan(3, 1, _D, mixed), ParallelPlan(2, 1, _D)):
            found = replace(task, plan=plan)

            def program(comm: ThreadCommunicator, task: Task = found) -> Result:
                return train(task, comm, virtual_engine(comm), kind)

            for result in run_virtual(plan.rows * plan.cols, program, seed=1):
                assert distance(result.parameters, expected.parameters) < 1e-10, (net, plan)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blocking", *STRATEGIES])
def test_a_rank_without_a_part_of_a_split_layer_holds_up_nobody(strategy: str) -> None:
    """Fewer features than rows: the first layer is empty on a rank, or all are; it still counts in norms and messages."""
    kind, options = (Blocking, {}) if strategy == "blocking" else STRATEGIES[strategy]
    for classes, optimizer in zip((2, 5), OPTIMIZERS.values(), strict=True):
        model = partial(nets.narrow, classes)
        task = Task(model, NumpyKernelSet(), optimizer, classes=classes, samples=9, batch=5, steps=3)
        expected = alone(task)
        for rows, cols, seed in ((3, 1, None), (3, 2, 1)):
            split = replace(task, plan=ParallelPlan(rows, cols, _M))

            def program(comm: ThreadCommunicator, task: Task = split) -> Result:
                return train(task, comm, virtual_engine(comm), kind, **options)

            for result in run_virtual(rows * cols, program, seed=seed):
                assert distance(result.parameters, expected.parameters) < 1e-10, (classes, rows, cols)
