"""Training steps of one network on one kernel set: what the stages that train and time run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.operators import KernelSet, LossHandle, StepContext
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.nn.program import StepHooks
from hpctrain.optim.optimizers import Sgd

_SILENT = StepHooks()
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Task:
    """pixels: of both sides of an image. batches: different ones, which take turns. rate: of learning. options: of the model."""

    model: str
    batch: int
    pixels: int
    batches: int = 3
    rate: float = 1e-4
    learnable: bool = False
    options: Mapping[str, object] = field(default_factory=dict)


def made_up_images(task: Task, channels: int, classes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Images of noise and their labels; learnable ones have the pattern of their class beneath the noise."""
    random = np.random.default_rng(0)
    shape = (task.pixels, task.pixels, channels)
    patterns = (
        random.standard_normal((classes, *shape), np.float32) if task.learnable else np.zeros((classes, 1, 1, 1), np.float32)
    )
    labels = [random.integers(0, classes, task.batch) for _ in range(task.batches)]
    return [patterns[numbers] + random.standard_normal((task.batch, *shape), np.float32) for numbers in labels], labels


class TrainingRun:
    """Forward, loss, backward, momentum update and running statistics on one rank.

    Args:
        kernels: who computes. dtype: of activations. resident: one batch of images is put into the program's input at the
            beginning and stays there, as PyTorch's are on the device in comparisons.
    """

    def __init__(self, task: Task, kernels: KernelSet, dtype: str, *, resident: bool = False) -> None:
        shape = (task.pixels, task.pixels, catalogue.image_shape(task.model)[2])
        self.task, self._kernels, self._resident = task, kernels, resident
        self.network = Network(catalogue.build(task.model, task.options), shape, kernels, dtype=dtype)
        self.program = self.network.program(task.batch, training=True)
        self._optimizers = [(Sgd(momentum=_MOMENTUM), group) for group in self.network.groups.values()]
        for optimizer, group in self._optimizers:
            optimizer.bind(group, group.segments)
        self._images, self._labels = made_up_images(task, shape[2], self.network.classes)
        self._ids = np.arange(task.batch)
        self._steps = 0
        if resident:
            self.program.set_input(self._images[0])

    def step(self, hooks: StepHooks = _SILENT) -> float:
        """Run one step and return the mean loss."""
        handle, batch = self.enqueue(hooks), self.task.batch
        return handle.result().loss / batch

    def enqueue(self, hooks: StepHooks = _SILENT) -> LossHandle:
        """One step, whose loss is on its way to the host. Statistics are waited for, after everything is enqueued."""
        batch, turn = self.task.batch, 0 if self._resident else self._steps % self.task.batches
        if not self._resident:
            self.program.set_input(self._images[turn])
        self.program.forward(StepContext(step=self._steps, sample_ids=self._ids), hooks)
        statistics = self.network.statistics
        handle, batch_statistics = self.program.loss(self._labels[turn], batch), statistics.fetch_batch()
        self.program.backward(hooks)
        for optimizer, group in self._optimizers:
            optimizer.update(group.segments, self.task.rate, None)
        if statistics.size:
            statistics.blend(batch * batch_statistics.result().astype(np.float64), batch)
        self._steps += 1
        return handle

    def values(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics on the host: copies."""
        to_host = self._kernels.arithmetic.to_host
        groups = {name: np.array(to_host(group.data)) for name, group in self.network.groups.items()}
        return groups | {"statistics": np.array(self.network.statistics.running)}
