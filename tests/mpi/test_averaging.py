"""Every averaging strategy is blocking averaging on real ranks, too; the parts that a transport can get wrong."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.agreement import check_same_schedule
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import CollectiveMismatchError
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support import nets
from tests.support.averaging import OF_NODES, OPTIMIZERS, STRATEGIES, Watched, make, one_step, run_steps
from tests.support.training import Task, distance, train

RANKS = [1, 2, 3, 4]
STEPS = 20


def _alone(optimizer: str, dtype: str = "float64") -> np.ndarray:
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=30, abort=comm.abort)
    return run_steps(make("blocking", optimizer, comm, engine, dtype), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_float64_equals_blocking(world: Communicator, progress: ProgressEngine, strategy: str, optimizer: str) -> None:
    alone = _alone(optimizer)
    data = run_steps(Watched(make(strategy, optimizer, world, progress)), STEPS)
    assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (1, 0, 1, 0)])
@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name.startswith(("sharded", "priority"))), *OF_NODES])
@pytest.mark.parallel(4)
def test_two_nodes_equal_blocking(world: Communicator, progress: ProgressEngine, strategy: str, nodes: tuple[int, ...]) -> None:
    for optimizer in ("nesterov", "lars, clipping"):
        alone = _alone(optimizer)
        data = run_steps(Watched(make(strategy, optimizer, world, progress, nodes=nodes)), STEPS)
        assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.parametrize("strategy", ["sharded, auto", "priority, exchange"])
@pytest.mark.parallel(4)
def test_two_nodes_under_a_progress_thread_equal_blocking(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    """Second stages begin in whichever thread finds the first complete; the order of postings must not depend on it."""
    alone = _alone("lars, clipping")
    averager = make(strategy, "lars, clipping", world, progress, nodes=(0, 0, 1, 1))
    progress.start_thread()
    try:
        for step in range(STEPS):
            with progress.computing():
                one_step(averager, step)
                time.sleep(1e-3)  # as a kernel would: the thread has messages to itself
        averager.drain()
    finally:
        progress.stop_thread()
    assert np.linalg.norm(averager.group.data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.parametrize("strategy", ["sharded, exchange", "priority"])
@pytest.mark.parallel(4)
def test_two_nodes_repeat_and_agree_bit_by_bit_in_float32(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    first, second = (run_steps(make(strategy, "clipping", world, progress, "float32", (1, 0, 0, 1)), STEPS) for _ in range(2))
    assert np.array_equal(first, world.broadcast_object(first))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_replicas_agree_bit_by_bit_in_float32(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    data = run_steps(make(strategy, "clipping", world, progress, "float32"), STEPS)
    assert np.array_equal(data, world.broadcast_object(data))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_a_whole_network_trains_alike(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    optimizer = partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2, clip_norm=0.5)
    task = Task(partial(nets.plain, dropout=0.3), NumpyKernelSet(), optimizer)
    kind, options = STRATEGIES[strategy]
    ours = train(task, world, progress, kind, **options)
    single = SingleCommunicator()
    alone = train(task, single, ProgressEngine(rank=0, deadline_seconds=30, abort=single.abort), Blocking)
    assert distance(ours.parameters, alone.parameters) < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_state_is_gathered_and_scattered(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    first = make(strategy, "nesterov", world, progress)
    run_steps(first, 3)
    second = make(strategy, "nesterov", world, progress)
    second.group.data[...] = first.group.data
    for name, parameter in second.group.parameters.items():
        second.load_state(parameter, first.full_state(first.group.parameters[name]))
    for step in range(3, 6):
        one_step(first, step)
        one_step(second, step)
    first.drain()
    second.drain()
    assert np.linalg.norm(second.group.data - first.group.data) <= 1e-14 * np.linalg.norm(first.group.data)


@pytest.mark.parallel([2, 3, 4])
def test_another_schedule_on_one_rank_is_named(world: Communicator, progress: ProgressEngine) -> None:
    schedule = make("sharded" if world.rank else "overlap", "sgd", SingleCommunicator(), progress).schedule
    assert schedule is not None
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 has overlap.*rank 1 has sharded"):
        check_same_schedule(world, schedule)
