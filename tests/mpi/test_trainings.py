"""Every strategy, grid, plan and network on real ranks trains as one process does; the parts that a transport can get wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.averagers import check_same_schedule
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import CollectiveMismatchError
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training.replica import Replica, StrategyFactory
from hpctrain.training.snapshot import Position
from hpctrain.training.state_hashes import hash_of, state_hashes
from hpctrain_testing.virtual.run import lone_rank
from tests.support import nets
from tests.support.averaging import OF_NODES, OPTIMIZERS, STRATEGIES, Watched, make, one_step, run_steps
from tests.support.grid_matrix import NETS, TOLERANCE, alone, compare, on_ranks, plan_of
from tests.support.training import Result, Task, batches, distance, replica_of, train

RANKS = [1, 2, 3, 4]
STEPS = 12


def _alone(optimizer: str, dtype: str = "float64") -> np.ndarray:
    return run_steps(make("blocking", optimizer, *lone_rank(), dtype), STEPS)


@pytest.mark.mpi_differs
@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_float64_equals_blocking(world: Communicator, progress: ProgressEngine, strategy: str, optimizer: str) -> None:
    alone = _alone(optimizer)
    data = run_steps(Watched(make(strategy, optimizer, world, progress)), STEPS)
    assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.sample(2)
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (1, 0, 1, 0)])
@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name.startswith(("sharded", "priority"))), *OF_NODES])
@pytest.mark.parallel(4)
def test_two_nodes_equal_blocking(world: Communicator, progress: ProgressEngine, strategy: str, nodes: tuple[int, ...]) -> None:
    for optimizer in ("nesterov", "lars, clipping"):
        alone = _alone(optimizer)
        data = run_steps(Watched(make(strategy, optimizer, world, progress, nodes=nodes)), STEPS)
        assert np.linalg.norm(data - alone) <= 1e-10 * np.linalg.norm(alone)


@pytest.mark.mpi_differs
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


@pytest.mark.mpi_differs
@pytest.mark.parametrize("strategy", ["sharded, exchange", "priority"])
@pytest.mark.parallel(4)
def test_two_nodes_repeat_and_agree_bit_by_bit_in_float32(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    first, second = (run_steps(make(strategy, "clipping", world, progress, "float32", (1, 0, 0, 1)), STEPS) for _ in range(2))
    assert np.array_equal(first, world.broadcast_object(first))
    assert np.array_equal(first, second)


@pytest.mark.sample(5)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_replicas_agree_bit_by_bit_in_float32(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    data = run_steps(make(strategy, "clipping", world, progress, "float32"), STEPS)
    assert np.array_equal(data, world.broadcast_object(data))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parallel(RANKS)
def test_a_whole_network_trains_alike(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    optimizer = partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2, clip_norm=0.5)
    task = Task(partial(nets.plain, dropout=0.3), NumpyKernelSet(), optimizer)
    kind, options = STRATEGIES[strategy]
    ours = train(task, world, progress, kind, **options)
    alone = train(task, *lone_rank(), Blocking)
    assert distance(ours.parameters, alone.parameters) < 1e-10


@pytest.mark.sample(4)
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


@pytest.mark.mpi_differs
@pytest.mark.parallel([2, 3, 4])
def test_another_schedule_on_one_rank_is_named(world: Communicator, progress: ProgressEngine) -> None:
    schedule = make("sharded" if world.rank else "overlap", "sgd", SingleCommunicator(), progress).schedule
    assert schedule is not None
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 has overlap.*rank 1 has sharded"):
        check_same_schedule(world, schedule)


SMALL_MODELS: dict[str, Callable[[], Layer]] = {"plain": partial(nets.plain, dropout=0.3), "residual": nets.residual}

USUAL_OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": Sgd,
    "nesterov": partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2, clip_norm=0.5),
    "lars": partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1),
}


def _single_rank(task: Task) -> Result:
    return train(task, *lone_rank(), Blocking)


@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", USUAL_OPTIMIZERS)
@pytest.mark.parametrize("net", SMALL_MODELS)
@pytest.mark.parallel(RANKS)
def test_float64_equals_one_process(world: Communicator, progress: ProgressEngine, net: str, optimizer: str) -> None:
    # 37 samples in batches of 8: the last batch has 5, which leaves 4 ranks with 2, 1, 1, 1
    task = Task(SMALL_MODELS[net], NumpyKernelSet(), USUAL_OPTIMIZERS[optimizer])
    many, one = train(task, world, progress, Blocking), _single_rank(task)
    assert distance(many.parameters, one.parameters) < 1e-10
    if one.statistics:
        assert distance(many.statistics, one.statistics) < 1e-10
    for mine, theirs in zip(many.totals, one.totals, strict=True):
        assert (mine.count, mine.top1, mine.top5) == (theirs.count, theirs.top1, theirs.top5)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("net", SMALL_MODELS)
@pytest.mark.parallel(RANKS)
def test_ranks_without_samples_change_nothing(world: Communicator, progress: ProgressEngine, net: str) -> None:
    task = Task(SMALL_MODELS[net], NumpyKernelSet(), USUAL_OPTIMIZERS["nesterov"], samples=9, batch=4)  # last batch: one sample
    assert distance(train(task, world, progress, Blocking).parameters, _single_rank(task).parameters) < 1e-10


MODELS: dict[str, Callable[[], Any]] = {
    "small": partial(catalogue.build, "small", {"classes": 5, "channels_in": 3, "channels": (4, 6), "dropout": 0.2}),
    "resnet20": partial(catalogue.build, "resnet20", {"classes": 5, "width": 0.5}),
    "vgg11_bn": partial(catalogue.build, "vgg11_bn", {"classes": 5, "width": 0.0625}),
}

KERNELS = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}

EXACT = [
    (strategy, {} if bucket is None else {"bucket_bytes": bucket})
    for strategy in (Sharded, Bucketed)
    for bucket in (None, 1000, 30_000)
]


def _exact_task(model: str, kernels: str) -> Task:
    shape = (32, 32, 3) if model == "vgg11_bn" else (12, 12, 3)
    task = Task(MODELS[model], KERNELS[kernels](), partial(Sgd, momentum=0.9, weight_decay=1e-3), image_shape=shape, samples=25)
    return Task(**{**vars(task), "batch": 13, "steps": 4 if model == "small" else 2, "dtype": "float32", "exact_shards": 12})


@cache
def _exact_alone(model: str, kernels: str) -> Result:
    return train(_exact_task(model, kernels), *lone_rank(), Blocking)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parallel(RANKS)
def test_any_ranks_have_the_bits_of_one(world: Communicator, progress: ProgressEngine, model: str, kernels: str) -> None:
    alone = _exact_alone(model, kernels)
    for strategy, options in EXACT if model == "small" else EXACT[2::3]:  # of large ones the largest messages
        many = train(_exact_task(model, kernels), world, progress, strategy, **options)
        for found, expected in ((many.parameters, alone.parameters), (many.statistics, alone.statistics)):
            for name, values in expected.items():
                assert found[name].tobytes() == values.tobytes(), f"{name}, {strategy.__name__} {options}"
        assert [totals.loss for totals in many.totals] == [totals.loss for totals in alone.totals]


SEVERAL = [2, 3, 4]

#: so that the whole takes seconds: a deep plain network with dropout, and a residual one, on small images
PIXELS = {"vgg16": 33, "resnet20": 17}
PLANS = {"vgg16": ("batch", "tiles", "mixed"), "resnet20": ("domain", "model", "mixed")}


def _task(name: str) -> Task:
    return replace(NETS[name].task(), image_shape=(PIXELS[name], PIXELS[name] - 1, 3), steps=3)


def _expected(task: Task, world: Communicator) -> Result:
    """One rank's result, computed once."""
    found: Result = world.broadcast_object(alone(task) if world.rank == 0 else None)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("net", PIXELS)
@pytest.mark.parallel(SEVERAL)
def test_every_plan_on_every_grid_equals_one_rank(world: Communicator, progress: ProgressEngine, net: str) -> None:
    task = _task(net)
    expected = _expected(task, world)
    for rows in (n for n in range(2, world.size + 1) if world.size % n == 0):
        for kind in PLANS[net]:
            plan = plan_of(NETS[net], kind, rows, world.size // rows)
            found = compare(on_ranks(replace(task, plan=plan), world, progress), expected)
            assert found.largest <= TOLERANCE, (rows, kind, found)


HASHED: dict[str, StrategyFactory] = {
    "bucketed": Bucketed,
    "sharded": partial(Sharded, options=ShardedOptions(bucket_bytes=512, fc_exchange="always")),
}


def _replica(world: Communicator, progress: ProgressEngine, rows: int, strategy: StrategyFactory) -> tuple[Task, Replica]:
    plan = ParallelPlan(rows, world.size // rows, Parallelism.MODEL if rows > 1 else Parallelism.BATCH)
    task = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, steps=3, plan=plan)
    return task, replica_of(task, world, progress, strategy, nominal_batch=task.batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", HASHED)
@pytest.mark.parallel([1, 2, 3, 4])
def test_hashes_are_those_of_the_checkpoint_on_any_grid(world: Communicator, progress: ProgressEngine, strategy: str) -> None:
    task, replica = _replica(world, progress, 1, HASHED[strategy])
    for batch in batches(task, replica.groups.position, world.size, replica.tiles):
        replica.step(batch, task.lr)
    replica.settle()
    replica.drain()
    found = state_hashes(replica)
    content: CheckpointContent = world.broadcast_object(replica.state(Position(), {}, copied=True))
    assert found == {key: hash_of(values) for key, values in content.tensors.items()}
    assert world.allgather_object(found) == [found] * world.size
    for rows in (rows for rows in range(2, world.size + 1) if world.size % rows == 0):
        for other in HASHED.values():
            _, split = _replica(world, progress, rows, other)
            split.load(content)
            assert state_hashes(split) == found, rows
