"""Layers that ranks with an emulated device each split: the numbers of one rank of NumPy in float64, whatever is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, StepContext
from hpctrain.data.loader import Batch
from hpctrain.nn.layers import Layer
from hpctrain.nn.program import Program
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Adamw, Lars, Sgd
from hpctrain.parallel.moves import moved, moved_back
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory, assert_waits_matter, kernels_on
from tests.support.training import Result, Task, assert_same_training, batches, replica_of, train

_MIXED = {
    "plain": {"conv1": Parallelism.DOMAIN, "conv2": Parallelism.MODEL, "fc1": Parallelism.MODEL, "fc2": Parallelism.BATCH},
    "residual": {"layer2.*": Parallelism.MODEL, "fc": Parallelism.MODEL},
    "narrow": {"conv": Parallelism.MODEL, "fc*": Parallelism.MODEL},
}
MODELS: dict[str, Callable[[], Layer]] = {
    "plain": partial(nets.plain, dropout=0.3),
    "residual": nets.residual,
    "narrow": partial(nets.narrow, classes=5),
}
OPTIMIZERS: list[Callable[[], Optimizer]] = [
    partial(Sgd, momentum=0.9, weight_decay=1e-3),
    partial(Sgd, momentum=0.8, nesterov=True, clip_norm=0.5),
    partial(Lars, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.1),
    partial(Adamw, epsilon=0.1, beta2=0.9, weight_decay=1e-3),
]
STRATEGIES: list[tuple[type, dict[str, Any]]] = [
    (Sharded, {"bucket_bytes": 2000}),
    (Bucketed, {"bucket_bytes": 2000}),
    (Priority, {"slice_parameters": 400}),
    (Lazy, {"max_interval": 1}),
    (Blocking, {}),
]
#: with many small messages, by seed
PRESSING: dict[int, tuple[type, dict[str, Any]]] = {
    3: (Priority, {"slice_parameters": 100}),
    7: (Sharded, {"bucket_bytes": 400}),
}


def plan_of(model: str, kind: str, rows: int, cols: int) -> ParallelPlan:
    """Return a plan of this kind on a grid."""
    if kind == "mixed":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, _MIXED[model])
    if kind == "tiles":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, tiles=(1, rows))
    return ParallelPlan(rows, cols, Parallelism(kind))


def task_of(model: str, kind: str, rows: int, cols: int, **changes: Any) -> Task:
    """37 samples in batches of 8: uneven shares, and a last batch that some ranks have nothing of."""
    task = Task(MODELS[model], NumpyKernelSet(), OPTIMIZERS[0], steps=5, plan=plan_of(model, kind, rows, cols))
    return replace(task, **changes)


def trained(
    task: Task, strategy: tuple[type, dict[str, Any]], kernels: Callable[[int], KernelSet], *, seed: int | None = None
) -> list[Result]:
    kind, options = strategy

    def program(comm: ThreadCommunicator) -> Result:
        of_rank = replace(task, kernels=kernels(comm.rank))
        return train(of_rank, comm, virtual_engine(comm), kind, nominal_batch=task.batch, **options)

    return run_virtual(task.plan.rows * task.plan.cols, program, seed=seed)


def alone(task: Task) -> Result:
    return trained(replace(task, plan=ParallelPlan()), (Blocking, {}), lambda rank: NumpyKernelSet())[0]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_orders_of_streams_and_messages(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """Uneven micro-batches, norms over both groups of parameters, and batches of which a split group has no sample."""
    model, kind = list(MODELS)[seed % 3], ("mixed", "tiles", "model", "domain")[seed % 4]
    rows, cols = ((2, 1), (3, 1), (2, 2))[seed // 4 % 3]
    changes: dict[str, Any] = {"micro_batches": 1 + seed % 2} if model != "residual" else {}
    task = task_of(model, kind, rows, cols, optimizer=OPTIMIZERS[seed % 4], **changes)
    results = trained(task, STRATEGIES[seed % 5], lambda rank: kernels_on(emulated_device(100 * seed + rank)), seed=seed)
    assert_same_training(results[0], alone(task))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "model", "kind"), [(3, "residual", "mixed"), (7, "residual", "mixed"), (7, "narrow", "model")])
def test_two_groups_of_parameters_do_not_wait_for_each_other_with_nccl(
    seed: int, model: str, kind: str, emulated_device: EmulatedDeviceFactory
) -> None:
    """All of NCCL has one stream: operations of both groups there would be enqueued in another order on another rank.

    The last training has one group alone: that of parameters that ranks hold parts of.
    """
    task = task_of(model, kind, 2, 2, transport="nccl", optimizer=OPTIMIZERS[seed % 4])
    results = trained(task, PRESSING[seed], lambda rank: kernels_on(emulated_device(100 * seed + rank)), seed=seed)
    expected = alone(task)
    for result in results:
        assert_same_training(result, expected)


@pytest.mark.sample(1)
@pytest.mark.slow
def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """Passes of two ranks, one of which leaves a wait of its moves out, end otherwise for some order of the work.

    Averaging waits at the same places: so there is none, and each rank keeps its own gradients. Two waits are left to
    test_mirrors: that before a mirror is used again, and that of a rank which only receives, into a place that is still read.
    """
    task = task_of("plain", "mixed", 2, 1, steps=2)

    def counts(wait: str) -> bool:
        mirrors = "CudaMirrors" in wait or "CudaTransit" in wait
        return mirrors and not wait.startswith("from the host") and not wait.endswith((".mirror", "._forget"))

    assert assert_waits_matter(emulated_device, partial(passes, task), counts) == 3


def passes(task: Task, kernels: Callable[..., KernelSet]) -> dict[str, np.ndarray]:
    """The gradients of the first rank after forward and backward passes over a few batches, whose sums stay its own."""

    def program(comm: ThreadCommunicator) -> dict[str, np.ndarray]:
        replica = replica_of(replace(task, kernels=kernels(comm.rank)), comm, virtual_engine(comm), Blocking)
        found = {}
        for number, batch in enumerate(batches(task, comm.rank, comm.size, replica.tiles)):
            run = replica.network.program(batch.share.counts, training=True)
            forward_and_backward(run, batch)
            for name, parameter in replica.network.parameters.items():
                found[f"{number} {name}"] = np.array(replica.network.kernels.arithmetic.to_host(parameter.grad))
        return found

    return run_virtual(2, program)[0]


def forward_and_backward(run: Program, batch: Batch) -> None:
    """A step without its update."""
    run.set_input(batch.x)
    run.forward(StepContext(sample_ids=batch.sample_ids))
    sums = run.loss(batch.y, batch.global_count)
    run.backward()
    sums.result()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "domain", "mixed"])
@pytest.mark.parametrize("grid", [(2, 1), (3, 1), (2, 2)], ids=lambda grid: "x".join(map(str, grid)))
def test_bytes_over_the_bus_are_those_of_the_plan(
    grid: tuple[int, int], kind: str, emulated_device: EmulatedDeviceFactory
) -> None:
    """In integers: what a rank sends leaves, what it receives arrives, in forward and, the other way round, in backward."""
    task = task_of("plain", kind, *grid)

    def program(comm: ThreadCommunicator) -> None:
        device = emulated_device(comm.rank)
        kernels = kernels_on(device)
        replica = replica_of(replace(task, kernels=kernels), comm, virtual_engine(comm), Blocking)
        network, distribution = replica.network, replica.distribution
        assert distribution is not None
        sent = received = 0
        for batch in batches(task, replica.groups.position, comm.size, replica.tiles):
            counts = batch.share.counts
            forward_and_backward(network.program(counts, training=True), batch)
            partitioned = distribution.partitioned(network.graph(sum(counts)), counts)
            for there, back in words(partitioned, distribution.group.rank):
                sent, received = sent + there, received + back
        assert sent > 0
        mirrors, counters = kernels.arithmetic.mirrors(), device.counters
        assert (counters.downloaded_bytes["to the host"], counters.uploaded_bytes["from the host"]) == (8 * sent, 8 * received)
        assert mirrors.pinned_bytes == distribution.group.buffer_bytes

    run_virtual(grid[0] * grid[1], program)


def words(graph: PartitionedGraph, rank: int) -> Iterator[tuple[int, int]]:
    """(sent, received) of a rank in each pass of each move. No gradient goes back to what has no parameters before it."""
    trained = {0: False}
    for step in graph.steps:
        parameters = step.node is not None and bool(step.node.parameters)
        trained[step.output] = parameters or any(trained[tensor] for tensor in step.inputs)
        if step.move is not None:
            there, back = moved(*step.move)[rank], moved_back(*step.move)[rank]
            yield (back, there) if step.summed else (there, back)
            if trained[step.inputs[0]]:
                yield (there, back) if step.summed else (back, there)


@pytest.mark.sample(1)
@pytest.mark.slow
def test_steps_allocate_nothing_and_wait_only_where_documented(emulated_device: EmulatedDeviceFactory) -> None:
    task = task_of("residual", "mixed", 2, 1, steps=9, samples=40)
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()

    def program(comm: ThreadCommunicator) -> list[str]:
        device = emulated_device(comm.rank)
        of_rank = replace(task, kernels=kernels_on(device))
        replica = replica_of(of_rank, comm, virtual_engine(comm), Sharded, nominal_batch=8, bucket_bytes=2000, replan=False)
        for step, batch in enumerate(batches(task, comm.rank, comm.size, replica.tiles)):
            replica.step(batch, task.lr)
            replica.settle()
            if step == 4:
                device.seal()
                device.counters.synchronisations.clear()
        replica.drain()
        for _, function in device.counters.synchronisations:
            assert f"`{'.'.join(function.split('.')[-2:])}`" in page, function
        return device.counters.late_allocations

    assert run_virtual(2, program) == [[], []]
