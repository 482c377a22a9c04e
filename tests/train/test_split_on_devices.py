"""Layers that ranks with an emulated device each split: the numbers of one rank of NumPy in float64, whatever is late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.layer import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers.adamw import Adamw
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.training import Result, Task, train

TOLERANCE = 1e-10

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


def plan_of(model: str, kind: str, rows: int, cols: int) -> ParallelPlan:
    """One of the kinds of plans on a grid; "early" lets halos travel while interiors are computed."""
    if kind == "mixed":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, _MIXED[model])
    if kind == "tiles":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, tiles=(1, rows))
    if kind == "early":
        names = frozenset(full for full, _ in MODELS[model]().walk())
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, overlapped=names)
    return ParallelPlan(rows, cols, Parallelism(kind))


def task_of(model: str, kind: str, rows: int, cols: int, **changes: Any) -> Task:
    """37 samples in batches of 8: uneven shares, and a last batch that some ranks have nothing of."""
    task = Task(MODELS[model], NumpyKernelSet(), OPTIMIZERS[0], steps=5, plan=plan_of(model, kind, rows, cols))
    return replace(task, **changes)


def kernels_on(device: EmulatedDevice) -> KernelSet:
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))


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


def assert_close(result: Result, expected: Result) -> None:
    for ours, theirs in ((result.parameters, expected.parameters), (result.statistics, expected.statistics)):
        assert ours.keys() == theirs.keys()
        for name, aim in theirs.items():
            limit = TOLERANCE * max(1.0, float(np.abs(aim).max(initial=0.0)))
            assert np.abs(ours[name] - aim).max(initial=0.0) <= limit, name
    for one, other in zip(result.totals, expected.totals, strict=True):
        assert (one.top1, one.count) == (other.top1, other.count)
        assert abs(one.loss - other.loss) <= TOLERANCE * abs(other.loss)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "domain", "mixed", "tiles", "early"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2), (3, 1)], ids=lambda grid: "x".join(map(str, grid)))
def test_a_training_is_that_of_one_rank_of_numpy(
    grid: tuple[int, int], model: str, kind: str, emulated_device: EmulatedDeviceFactory
) -> None:
    rows, cols = grid
    seed = 7 * rows + 3 * cols + 11 * list(MODELS).index(model) + len(kind)
    task = task_of(model, kind if rows > 1 else "batch", rows, cols, optimizer=OPTIMIZERS[seed % 4])
    devices = [emulated_device(seed + rank) for rank in range(rows * cols)]
    results = trained(task, STRATEGIES[seed % 5], lambda rank: kernels_on(devices[rank]), seed=seed)
    expected = alone(task)
    for result in results:
        assert_close(result, expected)
    for device in devices:
        device.finish()
