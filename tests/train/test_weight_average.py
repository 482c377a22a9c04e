"""Averages of weights in a replica: what checkpoints hold of them, which runs take them up, and evaluations with them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.errors import CheckpointError
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.metrics import EvaluationSums
from hpctrain.train.replica import Replica, StrategyFactory
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support import nets
from tests.support.training import Task, batches, made_up, replica_of

RULE = EmaRule(0.8)
TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, batch=8, steps=4, ema=RULE)


def _loader(replica: Replica, ranks: int) -> ArrayLoader:
    images, labels, _ = made_up(TASK)
    sampler = Sampler(TASK.samples, TASK.batch, seed=0, shuffle=False)
    return ArrayLoader(images, labels, sampler, rank=replica.groups.position, ranks=ranks, split_size=1, tiles=replica.tiles)


def _trained(
    comm: ThreadCommunicator, progress: ProgressEngine, strategy: StrategyFactory
) -> tuple[CheckpointContent, dict[str, float]]:
    replica = replica_of(TASK, comm, progress, strategy)
    for batch in batches(TASK, comm.rank, comm.size, replica.tiles):
        replica.step(batch, TASK.lr)
    sums = replica.evaluate(_loader(replica, comm.size))
    assert isinstance(sums, EvaluationSums)
    return replica.state(Position(global_step=TASK.steps), {}, copied=True), sums.means()


@pytest.fixture(scope="module")
def trained() -> tuple[CheckpointContent, dict[str, float]]:
    """The state of a training, and what its evaluation has said."""
    return run_virtual(3, lambda comm: _trained(comm, _engine(comm), Sharded))[0]


def _engine(comm: ThreadCommunicator) -> ProgressEngine:
    return ProgressEngine(rank=comm.rank, deadline_seconds=60, abort=comm.abort)


def _alone(task: Task) -> Replica:
    """A replica on one rank."""
    return run_virtual(1, lambda comm: replica_of(task, comm, _engine(comm), Blocking))[0]


def test_an_evaluation_is_one_of_the_weights_and_one_of_their_average(
    trained: tuple[CheckpointContent, dict[str, float]],
) -> None:
    content, means = trained

    def evaluated(comm: ThreadCommunicator, *, averaged: bool) -> dict[str, float]:
        replica = replica_of(Task(**{**vars(TASK), "ema": None}), comm, _engine(comm), Blocking)
        replica.load_weights(content, averaged=averaged)
        return replica.evaluate(_loader(replica, comm.size)).means()

    for averaged, prefix in ((False, ""), (True, "ema_")):
        alone = run_virtual(1, partial(evaluated, averaged=averaged))[0]
        assert alone == pytest.approx({name: means[f"{prefix}{name}"] for name in ("loss", "top1", "top5")}, rel=1e-12)
    assert means["loss"] != means["ema_loss"]


def test_a_run_that_begins_to_average_begins_with_its_weights(trained: tuple[CheckpointContent, dict[str, float]]) -> None:
    content, _ = trained
    without = {name: values for name, values in content.tensors.items() if "ema" not in name and "averaged" not in name}
    replica = _alone(TASK)
    replica.load(CheckpointContent(without, content.meta))
    state = replica.state(Position(), {})
    for name, parameter in replica.network.parameters.items():
        assert np.array_equal(state.tensors[f"optimizer/ema/{name}"], parameter.data)
    for name, view in replica.network.statistics.views.items():
        assert np.array_equal(state.tensors[f"averaged_statistics/{name}"], view)


def test_a_run_may_drop_its_average(trained: tuple[CheckpointContent, dict[str, float]]) -> None:
    content, _ = trained
    replica = _alone(Task(**{**vars(TASK), "ema": None}))
    replica.load(content)
    state = replica.state(Position(), {})
    assert not [name for name in state.tensors if "ema" in name or "averaged" in name]
    for name, values in state.tensors.items():
        assert np.array_equal(values, content.tensors[name])


def test_averages_that_are_not_there_are_not_evaluated(trained: tuple[CheckpointContent, dict[str, float]]) -> None:
    content, _ = trained
    without = {name: values for name, values in content.tensors.items() if "ema" not in name}
    with pytest.raises(CheckpointError, match="has no average of weights"):
        _alone(TASK).load_weights(CheckpointContent(without, content.meta), averaged=True)
