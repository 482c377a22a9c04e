"""Strategies under a whole network, as a training step drives them: micro-batches, and float32 on the fast kernel set."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.training import Result, Task, distance, train

MICRO = Task(
    partial(nets.plain, dropout=0.3),
    NumpyKernelSet(),
    partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5),
)
FLOAT32 = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2))


def _alone(task: Task) -> Result:
    comm = SingleCommunicator()
    return train(task, comm, ProgressEngine(rank=0, deadline_seconds=30, abort=comm.abort), Blocking)


def _together(task: Task, strategy: str, ranks: int) -> list[Result]:
    kind, options = (Blocking, {}) if strategy == "blocking" else STRATEGIES[strategy]
    return run_virtual(ranks, lambda comm: _train(task, comm, kind, options))


def _train(task: Task, comm: ThreadCommunicator, kind: type, options: dict[str, object]) -> Result:
    return train(task, comm, virtual_engine(comm), kind, **options)


@cache
def _one_large_batch() -> Result:
    return _alone(MICRO)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blocking", *(name for name in STRATEGIES if "exchange" not in name)])
def test_micro_batches_equal_one_large_batch(strategy: str) -> None:
    """37 samples in batches of 8 on 3 ranks, in 3 passes each: the last batch of an epoch leaves passes without a sample."""
    for result in _together(replace(MICRO, micro_batches=3), strategy, 3):
        assert distance(result.parameters, _one_large_batch().parameters) < 1e-10


SPLIT = replace(MICRO, model=nets.plain)


@cache
def _undivided() -> Result:
    return _alone(SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("strategy", ["blocking", "bucketed", "sharded", "sharded, exchange", "priority"])
def test_split_layers_clip_and_scale_as_whole_ones_do(strategy: str, grid: tuple[int, int]) -> None:
    """Blocks of the second convolution and of the first linear layer lie on a split group; all else is on every rank."""
    plan = ParallelPlan(*grid, Parallelism.BATCH, {"conv2": Parallelism.MODEL, "fc1": Parallelism.MODEL})
    for result in _together(replace(SPLIT, plan=plan), strategy, grid[0] * grid[1]):
        assert distance(result.parameters, _undivided().parameters) < 1e-10


def _median_distance(ours: Result, exact: Result) -> float:
    """Over the tensors: relative L2 distance."""
    return float(
        np.median([distance({name: ours.parameters[name]}, {name: exact.parameters[name]}) for name in exact.parameters])
    )


@cache
def _exact_and_blocking(seed: int) -> tuple[Result, float]:
    exact = _alone(replace(FLOAT32, seed=seed))
    blocking = _together(_float32(seed), "blocking", 3)[0]
    return exact, _median_distance(blocking, exact)


def _float32(seed: int) -> Task:
    return replace(FLOAT32, seed=seed, dtype="float32", kernels=OnednnKernelSet())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_on_onednn_is_as_near_to_float64_as_blocking(strategy: str, seed: int) -> None:
    exact, blocking = _exact_and_blocking(seed)
    assert 0 < blocking < 1e-4
    for result in _together(_float32(seed), strategy, 3):
        assert _median_distance(result, exact) <= 2 * blocking + 1e-6
