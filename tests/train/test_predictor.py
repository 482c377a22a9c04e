"""Predictions come in the order of the samples, on every rank, and are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.train.predictor import TopClasses, predict
from hpctrain.train.scores import log_softmax
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, made_up, replica_of
from tests.train.test_evaluator import _scores

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd))
TOP = 3


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("plan", "batch"),
    [(ParallelPlan(), 37), (ParallelPlan(1, 3), 2), (ParallelPlan(4, 1, Parallelism.DOMAIN), 8), (ParallelPlan(2, 2), 5)],
    ids=str,
)
def test_any_grid_predicts_what_one_rank_does(plan: ParallelPlan, batch: int, flip: bool) -> None:
    images, labels, _ = made_up(TASK)
    images[7] = np.nan
    mirrors = np.ascontiguousarray(images[:, :, ::-1])

    def run(comm: ThreadCommunicator) -> list[TopClasses]:
        engine = virtual_engine(comm)
        replica = replica_of(replace(TASK, plan=plan), comm, engine, Blocking)
        sampler = Sampler(len(images), batch, shuffle=False)
        loader, mirrored = (ArrayLoader(array, labels, sampler, **replica.place) for array in (images, mirrors))
        with np.errstate(invalid="ignore"):
            found = predict(replica.network, loader, replica.groups.all_ranks, engine, TOP, mirrored=mirrored if flip else None)
            return list(found)

    network = Network(TASK.model(), TASK.image_shape, TASK.kernels, dtype=TASK.dtype, seed=TASK.seed)
    with np.errstate(invalid="ignore"):
        chances = [np.exp(log_softmax(_scores(array, network))) for array in ((images, mirrors) if flip else (images,))]
    means = np.mean(chances, axis=0)
    order = np.argsort(-means, axis=1, kind="stable")[:, :TOP]
    finite = np.arange(len(images)) != 7
    for found in run_virtual(plan.rows * plan.cols, run):
        assert [part.first for part in found] == list(range(0, len(images), batch))
        predicted = np.concatenate([part.labels for part in found])
        probabilities = np.concatenate([part.probabilities for part in found])
        assert np.array_equal(predicted[finite], order[finite])
        assert np.allclose(probabilities[finite], np.take_along_axis(means, order, 1)[finite], rtol=1e-10)
        assert np.isnan(probabilities[7]).all()
        assert (np.diff(probabilities[finite], axis=1) <= 0).all()


def test_of_equal_classes_the_first_comes_first() -> None:
    network = Network(TASK.model(), TASK.image_shape, TASK.kernels, dtype=TASK.dtype)
    for group in network.groups.values():
        group.data[...] = 0
    images, labels, _ = made_up(TASK)
    loader = ArrayLoader(images, labels, Sampler(len(images), 50, shuffle=False))
    ((found,),) = run_virtual(1, lambda comm: list(predict(network, loader, comm, virtual_engine(comm), 5)))
    assert (found.labels == np.arange(5)).all()
    assert np.allclose(found.probabilities, 0.2, rtol=1e-15)
