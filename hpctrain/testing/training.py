"""Short trainings on made-up data, for comparing one number of ranks, kernel set or averager with another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.data.sampler import Sampler, counts, part_of
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from hpctrain.optim.base import Optimizer
from hpctrain.parallel.batch_norm import RankStatistics
from hpctrain.train.message import SmallMessage, StepTotals
from hpctrain.train.step import TrainingStep

AveragerFactory = Callable[..., GradientAverager]


@dataclass(frozen=True)
class Task:
    """What to train: the same on every rank. `samples` need not be a multiple of `batch`, nor `batch` of the ranks."""

    model: Callable[[], Layer]
    kernels: KernelSet
    optimizer: Callable[[], Optimizer]
    image_shape: tuple[int, int, int] = (9, 7, 3)
    classes: int = 5
    samples: int = 37
    batch: int = 8
    steps: int = 20
    lr: float = 0.05
    dtype: str = "float64"
    seed: int = 3
    micro_batches: int = 1
    smoothing: float = 0.1
    synchronised: bool = True


@dataclass
class Result:
    """Where a training ended, by name."""

    parameters: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    totals: list[StepTotals] = field(default_factory=list)


def batches(task: Task, part: int, parts: int) -> Iterator[Batch]:
    """The shares of one part: made-up images that depend on the sample alone."""
    random = np.random.default_rng(task.seed)
    images = random.standard_normal((task.samples, *task.image_shape)).astype(task.dtype)
    labels = random.integers(0, task.classes, task.samples)
    sampler = Sampler(task.samples, task.batch, seed=task.seed, shuffle=True)
    for step in range(task.steps):
        epoch, inside = divmod(step, sampler.steps_per_epoch)
        ids = part_of(sampler.ids(epoch, inside), part, parts)
        total = sampler.global_count(inside)
        yield Batch(images[ids], labels[ids], ids, counts(total, parts), total, epoch, inside)


def train(
    task: Task, comm: Communicator, progress: ProgressEngine, averager: AveragerFactory, **options: Any
) -> Result:
    """Train for `task.steps` on the ranks of `comm`. Collective.

    Args:
        averager: the class; it gets `options` beside what every averager gets.
    """
    network = Network(
        task.model(),
        task.image_shape,
        task.kernels,
        dtype=task.dtype,
        seed=task.seed,
        smoothing=task.smoothing,
        merger=RankStatistics(comm, progress) if task.synchronised else None,
    )
    averagers = {
        name: averager(group=group, optimizer=task.optimizer(), comm=comm, progress=progress, **options)
        for name, group in network.groups.items()
    }
    for each in averagers.values():
        each.agree()
    messages = comm.split(0, comm.rank, "messages")
    assert messages is not None
    message = SmallMessage(messages, progress, network.statistics.size)
    step = TrainingStep(network, averagers, progress, message, task.micro_batches)
    totals = []
    for number, batch in enumerate(batches(task, comm.rank, comm.size)):
        step.run(batch, number, task.lr)
        message.post(stop=False)
        found = message.read()
        assert found is not None
        network.statistics.blend(found.statistics, found.count)
        totals.append(found)
    for each in averagers.values():
        each.drain()
    return Result(
        {name: parameter.data.copy() for name, parameter in network.parameters.items()},
        {name: view.copy() for name, view in network.statistics.views.items()},
        totals,
    )


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest relative L2 distance |a - b| / |b| over the tensors (|b| = 0: |a|)."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name in a:
        scale = float(np.linalg.norm(b[name].astype(np.float64))) or 1.0
        worst = max(worst, float(np.linalg.norm(a[name].astype(np.float64) - b[name])) / scale)
    return worst
