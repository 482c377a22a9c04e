"""A replica's protocol: sums one step late, each once; a replica without averagers evaluates what another has trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.grid import ProcessGrid
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.errors import DivergedError
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.train.metrics import RunningSums
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, distance, made_up, replica_of, train

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=7)
GRIDS = [ParallelPlan(), ParallelPlan(1, 3), ParallelPlan(2, 1, Parallelism.DOMAIN), ParallelPlan(2, 2, Parallelism.MODEL)]


def _loader(task: Task, replica: Replica) -> ArrayLoader:
    images, labels, _ = made_up(task)
    return ArrayLoader(images, labels, Sampler(len(images), task.batch, shuffle=False), **replica.place)


def _late(comm: ThreadCommunicator, task: Task) -> tuple[list[float], dict[str, np.ndarray], list[tuple[int, float]]]:
    """A training that reads each step's sums one step late: losses, running statistics, and what the replica says of itself."""
    replica = replica_of(task, comm, virtual_engine(comm), Blocking)
    losses, said = [], []
    for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
        totals = replica.step(batch, task.lr)
        assert (totals is None) == (number == 0)
        losses += [] if totals is None else [totals.loss]
        said.append((replica.global_step, replica.lr))
    last = replica.settle()
    assert last is not None
    assert replica.settle() is None
    replica.drain()
    return [*losses, last.loss], {name: view.copy() for name, view in replica.network.statistics.views.items()}, said


@pytest.mark.parametrize("plan", GRIDS, ids=str)
def test_sums_that_are_read_late_are_those_of_each_step(plan: ParallelPlan) -> None:
    task = replace(TASK, plan=plan)
    ranks = plan.rows * plan.cols
    for comm_late, at_once in zip(
        run_virtual(ranks, partial(_late, task=task), seed=1),
        run_virtual(ranks, lambda comm: train(task, comm, virtual_engine(comm), Blocking), seed=2),
        strict=True,
    ):
        losses, statistics, said = comm_late
        assert losses == [totals.loss for totals in at_once.totals]
        assert distance(statistics, at_once.statistics) == 0.0
        assert said == [(number + 1, task.lr) for number in range(task.steps)]


@pytest.mark.parametrize("plan", GRIDS[1:], ids=str)
def test_a_replica_without_averagers_evaluates_alike(plan: ParallelPlan) -> None:
    task = replace(TASK, plan=plan)

    def evaluate(comm: ThreadCommunicator) -> tuple[RunningSums, RunningSums]:
        progress = virtual_engine(comm)
        trained = replica_of(task, comm, progress, Blocking)
        for batch in batches(task, trained.groups.position, comm.size, trained.tiles):
            trained.step(batch, task.lr)
        before = trained.evaluate(_loader(task, trained))  # which settles
        content = trained.state(Position(global_step=trained.global_step), {})
        groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
        network = make_network(
            task.model(), task.image_shape, task.kernels, groups=groups, progress=progress, plan=plan, dtype=task.dtype, seed=99,
            smoothing=task.smoothing,
        )  # fmt: skip
        other = Replica(network, groups=groups, progress=progress)
        other.load_weights(content)
        return before, other.evaluate(_loader(task, other))

    for before, after in run_virtual(plan.rows * plan.cols, evaluate):
        assert before == after
        assert before.count == task.samples


def test_what_is_not_finite_is_raised_by_settle_on_every_rank() -> None:
    def diverge(comm: ThreadCommunicator) -> str:
        replica = replica_of(TASK, comm, virtual_engine(comm), Blocking)
        for batch in batches(TASK, comm.rank, comm.size):
            batch.x[...] = np.inf if comm.rank == 1 else batch.x
            replica.step(batch, 0.25)
            break
        with pytest.raises(DivergedError) as caught:
            replica.settle()
        return str(caught.value)

    (sentence,) = set(run_virtual(3, diverge))
    assert "lower optimizer.lr (0.25 there)" in sentence


def _slices(comm: ThreadCommunicator) -> dict[str, list[int]]:
    replica = replica_of(replace(TASK, plan=ParallelPlan()), comm, virtual_engine(comm), Sharded, bucket_bytes=800)
    schedule = replica.averagers["all"].schedule
    assert schedule is not None
    for number, piece in enumerate(schedule.slices) if comm.size > 1 else ():
        for name in piece.parameters:
            assert number in replica.network.slices[name]
    return dict(replica.network.slices)


def test_a_network_knows_the_slices_that_travel_and_a_rank_alone_sends_none() -> None:
    (alone,) = run_virtual(1, _slices)
    assert alone == {}
    first, second = run_virtual(2, _slices)
    assert first == second
    assert len({number for numbers in first.values() for number in numbers}) > 1
