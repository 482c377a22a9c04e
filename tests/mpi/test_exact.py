"""The same bits on any number of real ranks, for whole networks of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.models import catalogue
from hpctrain.optim.optimizers.sgd import Sgd
from tests.support.training import Result, Task, train

RANKS = [1, 2, 3, 4]
MODELS: dict[str, Callable[[], Any]] = {
    "small": partial(catalogue.build, "small", {"classes": 5, "channels_in": 3, "channels": (4, 6), "dropout": 0.2}),
    "resnet20": partial(catalogue.build, "resnet20", {"classes": 5, "width": 0.5}),
    "vgg11_bn": partial(catalogue.build, "vgg11_bn", {"classes": 5, "width": 0.0625}),
}
KERNELS = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}
STRATEGIES = [
    (strategy, {} if bucket is None else {"bucket_bytes": bucket})
    for strategy in (Sharded, Bucketed)
    for bucket in (None, 1000, 30_000)
]


def _task(model: str, kernels: str) -> Task:
    shape = (32, 32, 3) if model == "vgg11_bn" else (12, 12, 3)
    task = Task(MODELS[model], KERNELS[kernels](), partial(Sgd, momentum=0.9, weight_decay=1e-3), image_shape=shape, samples=25)
    return Task(**{**vars(task), "batch": 13, "steps": 4 if model == "small" else 2, "dtype": "float32", "exact_shards": 12})


@cache
def _alone(model: str, kernels: str) -> Result:
    comm = SingleCommunicator()
    return train(_task(model, kernels), comm, ProgressEngine(rank=0, deadline_seconds=60, abort=comm.abort), Blocking)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parallel(RANKS)
def test_any_ranks_have_the_bits_of_one(world: Communicator, progress: ProgressEngine, model: str, kernels: str) -> None:
    alone = _alone(model, kernels)
    for strategy, options in STRATEGIES if model == "small" else STRATEGIES[2::3]:  # of large ones the largest messages
        many = train(_task(model, kernels), world, progress, strategy, **options)
        for found, expected in ((many.parameters, alone.parameters), (many.statistics, alone.statistics)):
            for name, values in expected.items():
                assert found[name].tobytes() == values.tobytes(), f"{name}, {strategy.__name__} {options}"
        assert [totals.loss for totals in many.totals] == [totals.loss for totals in alone.totals]
