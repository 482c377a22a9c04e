"""Training on the emulated device, which does its work as late and as oddly as it may: the numbers of NumPy in float64, and no
waits and allocations but those that are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import BackendError, DivergedError
from hpctrain.nn.layer import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.train.replica import Replica, StrategyFactory
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.training import Task, batches, replica_of

TOLERANCE = 1e-10
STEPS = 5
MODELS: list[Callable[[], Layer]] = [partial(nets.plain, dropout=0.3), partial(nets.residual, synchronised=False)]
STRATEGIES: list[StrategyFactory] = [Blocking, Bucketed, Sharded, Priority, Lazy]
OPTIMIZERS: list[Callable[[], Optimizer]] = [
    partial(Sgd, momentum=0.9, weight_decay=1e-3),
    partial(Sgd, momentum=0.8, nesterov=True),
    partial(Sgd, momentum=0.0, clip_norm=0.5),
    partial(Lars, momentum=0.9, weight_decay=1e-3, trust_coefficient=0.1),
]


def _task(seed: int) -> Task:
    """All pairs of a model, a strategy and an optimiser within 40 seeds; one to three micro-batches."""
    return Task(
        MODELS[seed % 2], NumpyKernelSet(), OPTIMIZERS[seed // 2 % 4], steps=STEPS, micro_batches=1 + seed % 3, smoothing=0.1
    )


def _kernels(device: EmulatedDevice, *, graphs: bool = True) -> CudaKernelSet:
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64", graphs=graphs))


def _replica(task: Task, kernels: KernelSet, strategy: StrategyFactory) -> Replica:
    comm = SingleCommunicator()
    progress = ProgressEngine(rank=0, deadline_seconds=60, abort=comm.abort)
    return replica_of(replace(task, kernels=kernels), comm, progress, strategy)


def _train(
    task: Task, kernels: KernelSet, strategy: StrategyFactory, *, after_step: Callable[[int], None] = lambda step: None
) -> dict[str, np.ndarray]:
    """Parameters, running statistics, optimiser state and the steps' losses, by name."""
    replica = _replica(task, kernels, strategy)
    losses = []
    for step, batch in enumerate(batches(task, 0, 1)):
        totals = replica.step(batch, task.lr)
        losses += [] if totals is None else [(totals.loss, totals.top1, totals.top5)]
        after_step(step)
    last = replica.settle()
    assert last is not None
    replica.drain()
    network, to_host = replica.network, kernels.arithmetic.to_host
    (averager,) = replica.averagers.values()
    return {
        "losses": np.array([*losses, (last.loss, last.top1, last.top5)]),
        **{name: np.array(to_host(parameter.data)) for name, parameter in network.parameters.items()},
        **{name: view.copy() for name, view in network.statistics.views.items()},
        **{
            f"{state} of {name}": values.copy()
            for name, parameter in network.parameters.items()
            for state, values in averager.full_state(parameter).items()
        },
    }


def _assert_close(result: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert result.keys() == expected.keys()
    for name, aim in expected.items():
        limit = TOLERANCE * max(1.0, float(np.abs(aim).max(initial=0.0)))
        assert np.abs(result[name] - aim).max(initial=0.0) <= limit, name


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_training_is_that_of_numpy(emulated_device: EmulatedDeviceFactory, seed: int) -> None:
    task, strategy = _task(seed), STRATEGIES[seed // 2 % 5]
    device = emulated_device(seed)
    _assert_close(_train(task, _kernels(device, graphs=bool(seed % 4)), strategy), _train(task, NumpyKernelSet(), strategy))
    device.finish()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bits_do_not_depend_on_streams_or_graphs(emulated_device: EmulatedDeviceFactory, model: Callable[[], Layer]) -> None:
    task = replace(_task(0), model=model)
    results = [
        _train(task, _kernels(emulated_device(seed), graphs=graphs), Sharded) for seed in (0, 7) for graphs in (False, True)
    ]
    for other in results[1:]:
        for name, values in results[0].items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_steps_allocate_nothing_and_wait_where_it_is_said(
    emulated_device: EmulatedDeviceFactory, model: Callable[[], Layer], optimizer: Callable[[], Optimizer]
) -> None:
    task = replace(_task(0), model=model, optimizer=optimizer, samples=40, batch=8, steps=9)
    device = emulated_device(3)
    waits: list[set[str]] = []

    def after_step(step: int) -> None:
        if step == 0:  # the second step is captured
            device.seal()
        waits.append({function for _, function in device.counters.synchronisations})
        device.counters.synchronisations.clear()

    _train(task, _kernels(device), Sharded, after_step=after_step)
    assert device.counters.late_allocations == []
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for function in set().union(*waits[2:]):
        assert f"`{'.'.join(function.split('.')[-2:])}`" in page


@pytest.mark.slow
def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """A training that leaves a wait out ends otherwise, or is told why, for some order of the work.

    Some waits are implied by another one just before: of several copies that are on their way, all but the last. So it is asked
    of each place in the code, not of each wait.
    """
    task = replace(_task(0), steps=4)
    device = emulated_device(1)
    expected = _train(task, _kernels(device), Sharded)
    places: dict[str, list[int]] = {}
    for number, wait in enumerate(device.waits):
        places.setdefault(wait.rpartition(" at ")[2], []).append(number)
    assert len(places) >= 2
    for place, numbers in places.items():
        trials = ((seed, number) for seed in range(4) for number in numbers)
        assert any(_fails(task, emulated_device(seed, ignored_wait=number), expected) for seed, number in trials), place


def _fails(task: Task, device: EmulatedDevice, expected: dict[str, np.ndarray]) -> bool:
    try:
        result = _train(task, _kernels(device), Sharded)
        device.finish()
    except (EmulatedDeviceError, DivergedError, ValueError):  # the device, the step's own look, a count that is NaN
        return True
    return any(not np.array_equal(result[name], values) for name, values in expected.items())


class _InNumpy(Sgd):
    """An optimiser that says nothing of arrays elsewhere."""

    any_arrays = False


def test_an_optimiser_in_numpy_is_refused_where_the_arrays_are_elsewhere(emulated_device: EmulatedDeviceFactory) -> None:
    task = replace(_task(0), optimizer=_InNumpy)
    _replica(task, NumpyKernelSet(), Sharded)
    with pytest.raises(BackendError, match=r"^The optimizer _InNumpy computes with NumPy, .* backend cuda; let it .*\.$"):
        _replica(task, _kernels(emulated_device()), Sharded)
