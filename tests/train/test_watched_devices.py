"""Weights on devices are watched as those of the host: no false alarm, no other bit, and each flipped bit is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.errors import CorruptedStateError
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.train.replica import Replica
from hpctrain.train.weight_watch import CheckCadence
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.training import Task, batches, replica_of, train

pytestmark = pytest.mark.slow

STRATEGIES: dict[str, tuple[type, dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "overlap": (Overlap, {}),
    "sharded": (Sharded, {"bucket_bytes": 1000}),
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
}
EVERY_STEP, IN_TURN = CheckCadence(1, 1), CheckCadence(1, 3, 1)
FLIPPED_STEP = 3

Flip = Callable[[Replica], None]


def _task(device: EmulatedDevice, checks: CheckCadence, precision: Precision = "float64", **changes: Any) -> Task:
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision))
    task = Task(nets.plain, kernels, partial(Sgd, momentum=0.9), steps=5, checks=checks, dtype=precision)
    return replace(task, **changes)


def _averager_of(replica: Replica, name: str) -> GradientAverager:
    return next(averager for averager in replica.averagers.values() if name in averager.group.parameters)


def _flip(replica: Replica, name: str, array: Any) -> None:
    """One bit of the first element, of few consequences."""
    arithmetic, place = _averager_of(replica, name).group.arithmetic, array.reshape(-1)[:1]
    bits = arithmetic.to_host(place).copy()
    bits.view(np.uint8)[2] ^= np.uint8(8)
    arithmetic.from_host(place, bits)


def _parameter(replica: Replica) -> None:
    _flip(replica, "conv2.weight", replica.network.parameters["conv2.weight"].data)


def _state(replica: Replica) -> None:
    averager = _averager_of(replica, "conv2.weight")
    owned = [segment for segment in averager.owned() if segment.parameter == "conv2.weight" and segment.size]
    for segment in owned[:1]:
        _flip(replica, "conv2.weight", averager.optimizer.state(segment)["momentum"])


@dataclass
class _Run:
    """How a training went on one rank. error: "" where it went through. steps: begun."""

    error: str = ""
    steps: int = 0


def _run(comm: ThreadCommunicator, task: Task, strategy: str, flip: Flip, ranks: tuple[int, ...]) -> _Run:
    kind, options = STRATEGIES[strategy]
    replica, run = replica_of(task, comm, virtual_engine(comm), kind, **options), _Run()
    replica.require_alike(schedules=True)
    try:
        for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
            run.steps = number + 1
            replica.drain()
            if number == FLIPPED_STEP and comm.rank in ranks:
                flip(replica)
            replica.step(batch, task.lr)
        replica.settle()
        replica.require_alike()
    except CorruptedStateError as error:
        run.error = str(error)
    task.kernels.wait()  # what a step has enqueued still reads the replica's arrays
    return run


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_checks_change_no_bit_and_find_nothing(strategy: str, ranks: int, emulated_device: EmulatedDeviceFactory) -> None:
    kind, options = STRATEGIES[strategy]
    optimizer = partial(Adamw, epsilon=0.1) if ranks == 2 else partial(Sgd, momentum=0.9)
    found = []
    for checks in (CheckCadence(), EVERY_STEP, IN_TURN):

        def program(comm: ThreadCommunicator, checks: CheckCadence = checks) -> dict[str, bytes]:
            task = _task(emulated_device(comm.rank), checks, optimizer=optimizer)
            result = train(task, comm, virtual_engine(comm), kind, **options)
            return {name: values.tobytes() for name, values in (*result.parameters.items(), *result.statistics.items())}

        found.append(run_virtual(ranks, program, seed=ranks, deadline_seconds=300))
    assert found[0] == found[1] == found[2]


@pytest.mark.sample(3)
@pytest.mark.parametrize("flip", [_parameter, _state])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_flipped_bit_is_found_and_named(strategy: str, flip: Flip, emulated_device: EmulatedDeviceFactory) -> None:
    """Of three ranks: by the others where all hold the same, else by its owner, by the step in which it is compared next."""
    precision: Precision = "bfloat16" if strategy in ("overlap", "lazy") else "float64"
    ranks = (1,) if flip is _parameter or strategy in ("blocking", "overlap") else (0, 1, 2)

    def program(comm: ThreadCommunicator) -> _Run:
        task = _task(emulated_device(comm.rank), EVERY_STEP, precision, steps=9)
        return _run(comm, task, strategy, flip, ranks)

    runs = run_virtual(3, program, deadline_seconds=300)
    assert all(run == runs[0] for run in runs)
    what = "parameter conv2.weight" if flip is _parameter else "the momentum of conv2.weight"
    by_others = f"rank 1 holds other bits of {what} than ranks 0, 2;" in runs[0].error
    by_itself = f"{what} changed between two updates" in runs[0].error
    assert by_others or (by_itself and strategy in ("sharded", "lazy")), runs[0]
    assert runs[0].steps <= FLIPPED_STEP + (6 if strategy == "lazy" else 4)


def test_one_rank_finds_changes_of_its_own_state(emulated_device: EmulatedDeviceFactory) -> None:
    run = run_virtual(1, lambda comm: _run(comm, _task(emulated_device(0), EVERY_STEP, steps=9), "blocking", _state, (0,)))[0]
    assert run.error.startswith("On rank 0 the momentum of conv2.weight changed between two updates")
    assert run.steps <= FLIPPED_STEP + 4


def test_checks_allocate_nothing_once_all_has_had_its_turn(emulated_device: EmulatedDeviceFactory) -> None:
    """Not even in the first step that looks at a part: its memory is there from the start."""
    devices = [emulated_device(rank) for rank in range(2)]

    def program(comm: ThreadCommunicator) -> None:
        task = _task(devices[comm.rank], IN_TURN, steps=8, samples=40)  # batches of one size
        replica = replica_of(task, comm, virtual_engine(comm), Sharded)
        replica.require_alike(schedules=True)
        for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
            replica.step(batch, task.lr)
            if number == 1:
                devices[comm.rank].seal()
        replica.settle()
        replica.require_alike()

    run_virtual(2, program, deadline_seconds=300)
    for device in devices:
        assert device.counters.late_allocations == []
