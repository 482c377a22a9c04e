"""Training on several ranks with an emulated device each: the numbers of one rank of NumPy in float64, whatever is late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.transports import Transport
from hpctrain.errors import BackendError, DivergedError
from hpctrain.nn.layer import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.lamb import Lamb
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.device_views import ViewingCommunicator
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.training import Result, Task, assert_same_training, batches, replica_of, train


@dataclass(frozen=True)
class _Way:
    """A strategy with its options, and ranks of a node."""

    strategy: type
    options: dict[str, Any] = field(default_factory=dict)
    per_node: int | None = None


WAYS = {
    "sharded": _Way(Sharded, {"bucket_bytes": 2000}),
    "two-levels": _Way(Sharded, {"bucket_bytes": 2000}, per_node=2),
    "exchanging": _Way(Sharded, {"fc_exchange": "always"}),
    "blocking": _Way(Blocking),
    "overlap": _Way(Overlap),
    "bucketed": _Way(Bucketed, {"bucket_bytes": 2000}),
    "bucketed-two-levels": _Way(Bucketed, {"bucket_bytes": 2000}, per_node=2),
    "priority": _Way(Priority, {"slice_parameters": 400}),
    "lazy": _Way(Lazy, {"max_interval": 1}),
    "sparse": _Way(Sparse, {"density": 1.0, "compress": "always", "least_elements": 4}, per_node=1),
}


def _fits(way: str, ranks: int) -> bool:
    """Two levels need two nodes of two ranks each."""
    return WAYS[way].per_node != 2 or ranks == 4


MODELS: list[Callable[[], Layer]] = [partial(nets.plain, dropout=0.3), nets.residual]
OPTIMIZERS: list[Callable[[], Optimizer]] = [
    partial(Sgd, momentum=0.9, weight_decay=1e-3),
    partial(Sgd, momentum=0.8, nesterov=True, clip_norm=0.5),
    partial(Lars, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.1),
    partial(Adamw, epsilon=0.1, beta2=0.9, weight_decay=1e-3),
    partial(Lamb, epsilon=0.1, weight_decay=1e-2),
]


def _task(seed: int, **changes: Any) -> Task:
    """37 samples in batches of 8: uneven shares on 3 ranks, and a last batch that some ranks have nothing of."""
    return replace(Task(MODELS[seed % 2], NumpyKernelSet(), OPTIMIZERS[seed % 5], steps=5, micro_batches=1), **changes)


def _kernels(device: EmulatedDevice, *, graphs: bool = True) -> KernelSet:
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64", graphs=graphs))


def _trained(task: Task, way: _Way, ranks: int, kernels: Callable[[int], KernelSet], *, seed: int | None = None) -> list[Result]:
    def program(comm: ThreadCommunicator) -> Result:
        of_rank = replace(task, kernels=kernels(comm.rank))
        ranks = ViewingCommunicator(comm) if task.transport == "mpi" else comm
        return train(of_rank, ranks, virtual_engine(comm), way.strategy, nominal_batch=task.batch, **way.options)

    return run_virtual(ranks, program, seed=seed, ranks_per_node=way.per_node)


def _alone(task: Task) -> Result:
    return _trained(task, WAYS["blocking"], 1, lambda rank: NumpyKernelSet())[0]


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["staged", "mpi", "nccl"])
@pytest.mark.parametrize(("way", "ranks"), [(name, ranks) for name in WAYS for ranks in (2, 3, 4) if _fits(name, ranks)])
def test_a_training_is_that_of_one_rank_of_numpy(
    way: str, ranks: int, transport: Transport, emulated_device: EmulatedDeviceFactory
) -> None:
    seed = 10 * list(WAYS).index(way) + ranks
    task = _task(seed, transport=transport)
    devices = [emulated_device(seed + rank) for rank in range(ranks)]
    results = _trained(task, WAYS[way], ranks, lambda rank: _kernels(devices[rank], graphs=bool(seed % 4)), seed=seed)
    expected = _alone(task)
    for result in results:
        assert_same_training(result, expected)
        for name, values in results[0].parameters.items():
            np.testing.assert_array_equal(result.parameters[name], values)
    for device in devices:
        device.finish()


@pytest.mark.slow
def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """A training of two ranks, one of which leaves a wait of its transport out, ends otherwise for some order of the work."""
    task = _task(0, steps=3)
    made: list[EmulatedDevice] = []

    def kernels(rank: int, ignored_wait: int | None = None, seed: int = 1) -> KernelSet:
        device = emulated_device(seed + rank, ignored_wait=ignored_wait if rank == 0 else None)
        made.extend([device] if rank == 0 else [])
        return _kernels(device)

    way = WAYS["sharded"]
    expected = _trained(task, way, 2, kernels)[0].parameters
    places: dict[str, list[int]] = {}
    for number, text in enumerate(made[0].waits):
        if "mirrors" in text and not text.endswith(".mirror"):  # that one comes a step later than it must, see test_mirrors
            places.setdefault(text.partition(" waits for ")[0] + text.rpartition(" at ")[2], []).append(number)
    assert len(places) == 3, sorted(places)  # nothing is received that has not been sent something before

    def fails(seed: int, number: int) -> bool:
        try:
            found = _trained(task, way, 2, partial(kernels, ignored_wait=number, seed=seed))[0].parameters
        except (EmulatedDeviceError, DivergedError, ValueError):
            return True
        return any(not np.array_equal(found[name], values) for name, values in expected.items())

    for place, numbers in places.items():
        trials = ((seed, number) for seed in range(1, 5) for number in numbers[:: max(1, len(numbers) // 12)])
        assert any(fails(seed, number) for seed, number in trials), place


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "bucketed", "priority"])
def test_steps_allocate_nothing_and_wait_where_it_is_said(strategy: str, emulated_device: EmulatedDeviceFactory) -> None:
    task, way = _task(0, steps=9, samples=40), WAYS[strategy]
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()

    def program(comm: ThreadCommunicator) -> list[str]:
        device = emulated_device(comm.rank)
        of_rank = replace(task, kernels=_kernels(device))
        options = way.options if strategy == "bucketed" else {**way.options, "replan": False}
        replica = replica_of(of_rank, comm, virtual_engine(comm), way.strategy, nominal_batch=8, **options)
        for step, batch in enumerate(batches(task, comm.rank, comm.size)):
            replica.step(batch, task.lr)
            replica.settle()
            if step == 4:  # the second step is captured; as many mirrors as are ever on their way are there by now
                device.seal()
                device.counters.synchronisations.clear()
        replica.drain()
        for _, function in device.counters.synchronisations:
            assert f"`{'.'.join(function.split('.')[-2:])}`" in page, function
        return device.counters.late_allocations

    assert run_virtual(2, program) == [[], []]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("sharded", 2), ("sharded", 3), ("priority", 3), ("bucketed", 2), ("overlap", 3)]
)
def test_bytes_over_the_bus_follow_from_the_schedule(strategy: str, ranks: int, emulated_device: EmulatedDeviceFactory) -> None:
    """In integers: each slice leaves, with the owned part of its parameters; sums of owned parts and the others' parts arrive."""
    task, way = _task(0, steps=4), WAYS[strategy]

    def program(comm: ThreadCommunicator) -> None:
        kernels = _kernels(emulated_device(comm.rank))
        replica = replica_of(
            replace(task, kernels=kernels), comm, virtual_engine(comm), way.strategy, nominal_batch=task.batch, **way.options
        )
        for batch in batches(task, comm.rank, comm.size):
            replica.step(batch, task.lr)
        replica.drain()
        (averager,) = replica.averagers.values()
        assert averager.schedule is not None
        left = arrived = 0
        for piece in averager.schedule.slices:
            left += piece.size if strategy in ("bucketed", "overlap") else piece.size + piece.owned_size(comm.rank, comm.size)
            arrived += piece.size  # summed: all of it, or the owned part, and the others' parts once they are gathered
        mirrors = kernels.arithmetic.mirrors()
        assert mirrors is not None
        assert (mirrors.copied.to_host, mirrors.copied.from_host) == (8 * left * task.steps, 8 * arrived * task.steps)
        summed = strategy in ("bucketed", "overlap")  # in place; else gradients, sums of owned parts and parameters have mirrors
        assert mirrors.pinned_bytes == 8 * (arrived if summed else left + arrived)

    run_virtual(ranks, program)


def test_parameters_in_16_bits_are_refused(emulated_device: EmulatedDeviceFactory) -> None:
    task = _task(0)

    def program(comm: ThreadCommunicator) -> None:
        with pytest.raises(BackendError, match=r"^wire_parameters is bfloat16, but parameters of backend cuda travel"):
            replica_of(
                replace(task, kernels=_kernels(emulated_device(comm.rank))),
                comm,
                virtual_engine(comm),
                Sharded,
                wire_parameters="bfloat16",
            )

    run_virtual(2, program)
