"""Whole networks on the emulated device, against the NumPy set in float64: losses, gradients, parameters, statistics.

So all kernels together, with the plan's sharing of memory, captured and not, under streams that do their work late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support.emulated import CudaKernelsFactory
from tests.support.training import Result, Task, train

TOLERANCE = 1e-10


def _model(name: str, **options: object) -> Callable[[], Layer]:
    return lambda: catalogue.build(name, options)


TASKS = {
    "resnet20": Task(_model("resnet20"), NumpyKernelSet(), Sgd, (32, 32, 3), 10, samples=19, batch=4, steps=5),
    "resnet18": Task(
        _model("resnet18", width=0.125, classes=7), NumpyKernelSet(), Sgd, (48, 48, 3), 7, samples=13, batch=3, steps=5
    ),
    "vgg11_bn": Task(
        _model("vgg11_bn", width=0.0625, classes=6), NumpyKernelSet(), Sgd, (32, 32, 3), 6, samples=13, batch=3, steps=5
    ),
}


def _trained(task: Task, kernels: KernelSet) -> Result:
    comm = SingleCommunicator()
    progress = ProgressEngine(rank=0, deadline_seconds=60, abort=comm.abort)
    return train(replace(task, kernels=kernels), comm, progress, Blocking, keep_gradients=True)


def _assert_close(result: Result, expected: Result) -> None:
    for kind in ("gradients", "parameters", "statistics"):
        values, aims = getattr(result, kind), getattr(expected, kind)
        assert values.keys() == aims.keys()
        for name, aim in aims.items():
            limit = TOLERANCE * max(1.0, float(np.abs(aim).max()))
            assert np.abs(values[name] - aim).max(initial=0.0) <= limit, f"{kind} of {name}"
    for step, (totals, aim) in enumerate(zip(result.totals, expected.totals, strict=True)):
        assert totals.loss == pytest.approx(aim.loss, rel=TOLERANCE), f"step {step}"
        assert (totals.top1, totals.top5, totals.count) == (aim.top1, aim.top5, aim.count)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_five_steps_are_those_of_numpy(cuda_kernels: CudaKernelsFactory, name: str) -> None:
    expected = _trained(TASKS[name], NumpyKernelSet())
    _assert_close(_trained(TASKS[name], cuda_kernels("float64", 1)), expected)
