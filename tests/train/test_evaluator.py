"""An evaluation counts each sample once, on any ranks, and is what one rank computes in one pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.train.confusion import ConfusionCounts, ConfusionMatrix
from hpctrain.train.metrics import RunningSums
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, made_up, replica_of

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd), smoothing=0.0)


def _scores(images: np.ndarray, network: Network) -> np.ndarray:
    program = network.program(len(images), training=False)
    program.x[...] = images
    return np.array(program.forward(StepContext(training=False, global_count=1)))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        (ParallelPlan(), 8),
        (ParallelPlan(1, 5), 1),
        (ParallelPlan(3, 1, Parallelism.DOMAIN), 8),
        (ParallelPlan(2, 1, Parallelism.MODEL), 64),
        (ParallelPlan(2, 2), 5),
    ],
    ids=str,
)
def test_confusions_are_exact_and_mirror_images_count_half_on_any_grid(plan: ParallelPlan, batch: int, flip: bool) -> None:
    images, labels, _ = made_up(TASK)
    mirrors = np.ascontiguousarray(images[:, :, ::-1])

    def evaluate(comm: ThreadCommunicator) -> tuple[RunningSums, ConfusionMatrix]:
        replica = replica_of(replace(TASK, plan=plan), comm, virtual_engine(comm), Blocking)
        sampler, counts = Sampler(len(images), batch, shuffle=False), ConfusionCounts(TASK.classes)
        loader = ArrayLoader(images, labels, sampler, **replica.place)
        mirrored = ArrayLoader(mirrors, labels, sampler, **replica.place) if flip else None
        sums = replica.evaluate(loader, mirrored=mirrored, confusion=counts)
        return sums, counts.summed(replica.groups.all_ranks, replica.progress)

    network = Network(TASK.model(), TASK.image_shape, TASK.kernels, dtype=TASK.dtype, seed=TASK.seed)
    chances = [np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) for logits in (_scores(images, network),)]
    if flip:
        logits = _scores(mirrors, network)
        chances.append(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    means = np.mean(chances, axis=0)
    expected = np.zeros((TASK.classes, TASK.classes), np.int64)
    np.add.at(expected, (labels, means.argmax(axis=1)), 1)
    for sums, matrix in run_virtual(plan.rows * plan.cols, evaluate):
        assert np.array_equal([matrix.of_label(label)[:-1] for label in range(TASK.classes)], expected)
        assert (sums.count, sums.top1, matrix.undecided) == (len(images), int(np.trace(expected)), 0)
        assert np.isclose(sums.loss, -np.log(means[np.arange(len(labels)), labels]).sum(), rtol=1e-12)
