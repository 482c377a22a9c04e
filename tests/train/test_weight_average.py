"""Averages of weights in a replica: what checkpoints hold of them, which runs take them up, and evaluations with them."""

from __future__ import annotations

from dataclasses import replace
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
from hpctrain.nn.frozen import layer_of
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
    comm: ThreadCommunicator, progress: ProgressEngine, strategy: StrategyFactory, task: Task = TASK
) -> tuple[CheckpointContent, dict[str, float]]:
    replica = replica_of(task, comm, progress, strategy)
    for batch in batches(task, comm.rank, comm.size, replica.tiles):
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


FROZEN = ("conv1", "bn1", "layer1.*", "fc")


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_frozen_has_no_average_and_is_its_own(ranks: int) -> None:
    """Checkpoints of both layouts say so, and who freezes nothing reads them alike."""
    task = replace(TASK, frozen=FROZEN)

    def program(comm: ThreadCommunicator) -> tuple[CheckpointContent, dict[str, float], set[str]]:
        content, means = _trained(comm, _engine(comm), Sharded, task)
        again = replica_of(task, comm, _engine(comm), Sharded)
        again.load(content)
        state, (parts, _) = again.state(Position(), {}, copied=True), again.own_parts(Position(), {})
        for key, values in content.tensors.items():
            assert np.array_equal(state.tensors[key], values), key
        assert again.evaluate(_loader(again, comm.size)).means() == means
        return content, means, set(parts)

    results = run_virtual(ranks, program)
    content, means, _ = results[0]
    assert set().union(*(keys for *_, keys in results)) == content.tensors.keys()
    network = _alone(task).network
    statistics = {name for name in network.statistics.views if layer_of(name) not in network.frozen}
    assert 0 < len(statistics) < len(network.statistics.views)
    averages = {key for key in content.tensors if "ema/" in key or "averaged" in key}
    wanted = {f"optimizer/ema/{name}" for name in network.trained} | {f"averaged_statistics/{name}" for name in statistics}
    assert averages == wanted
    reader = _alone(replace(TASK, ema=None))
    reader.load_weights(content, averaged=True)
    for name, parameter in reader.network.parameters.items():
        assert np.array_equal(parameter.data, content.tensors.get(f"optimizer/ema/{name}", content.tensors[f"parameters/{name}"]))
    found = run_virtual(1, partial(_evaluated_with_averages, content=content))[0]
    assert found == pytest.approx({name: means[f"ema_{name}"] for name in ("loss", "top1", "top5")}, rel=1e-12)


def _evaluated_with_averages(comm: ThreadCommunicator, content: CheckpointContent) -> dict[str, float]:
    replica = replica_of(replace(TASK, ema=None), comm, _engine(comm), Blocking)
    replica.load_weights(content, averaged=True)
    return replica.evaluate(_loader(replica, comm.size)).means()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_average_begins_with_weights_that_are_loaded_before_the_first_step(
    trained: tuple[CheckpointContent, dict[str, float]], ranks: int
) -> None:
    """Those that are loaded later it takes up by its rule alone."""
    content, means = trained

    def program(comm: ThreadCommunicator) -> None:
        replica = replica_of(TASK, comm, _engine(comm), Sharded)
        for _ in range(2):
            replica.load_weights(content)
            found = replica.evaluate(_loader(replica, comm.size)).means()
            assert found["ema_loss"] == found["loss"] == pytest.approx(means["loss"], rel=1e-12)
        state = replica.state(Position(), {}, copied=True).tensors
        for name in replica.network.parameters:
            assert np.array_equal(state[f"optimizer/ema/{name}"], content.tensors[f"parameters/{name}"])
        for batch in batches(TASK, comm.rank, comm.size, replica.tiles):
            replica.step(batch, TASK.lr)
        replica.settle()
        replica.drain()
        before = replica.state(Position(), {}, copied=True).tensors
        replica.load_weights(content)
        after = replica.state(Position(), {}, copied=True).tensors
        for key, values in before.items():
            averages = "ema/" in key or "averaged" in key
            assert np.array_equal(after[key], values) is (averages or key.startswith("optimizer/")), key

    run_virtual(ranks, program)
