"""Snapshots on grids: whole tensors, whatever grid, plan and averager give and take them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.grid import ProcessGrid
from hpctrain.errors import CheckpointError
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train import snapshot
from hpctrain.train.metrics import RunningSums
from hpctrain.train.shards import Shards
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets

POSITION = Position(2, 6, 17, RunningSums(1.5, 4, 5, 6))
MIXED = {
    "plain": {"conv1": Parallelism.DOMAIN, "conv2": Parallelism.MODEL, "fc*": Parallelism.MODEL},
    "residual": {"*1": Parallelism.DOMAIN, "layer2.*": Parallelism.MODEL, "fc": Parallelism.MODEL},
}
NETS: dict[str, Callable[[], Layer]] = {"plain": nets.plain, "residual": nets.residual}
AVERAGERS: dict[str, Callable[..., GradientAverager]] = {
    "blocking": Blocking,
    "sharded": partial(Sharded, fc_exchange="never"),
    "bucketed": partial(Bucketed, bucket_bytes=512),
}
GRIDS = [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (5, 1), (7, 1), (13, 1)]


class Trained:
    """What a snapshot is taken of, on one rank."""

    def __init__(
        self, comm: ThreadCommunicator, model: Layer, plan: ParallelPlan, averager: Callable[..., GradientAverager]
    ) -> None:
        progress = virtual_engine(comm)
        groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
        axis = groups.split_group(progress)
        self.network = Network(
            model,
            (9, 7, 3),
            NumpyKernelSet(),
            dtype="float64",
            mergers=groups.mergers(progress),
            distribution=None if axis is None else GridDistribution(plan, axis),
        )
        self.averagers = {
            name: averager(group=group, optimizer=Sgd(momentum=0.9), comm=groups.gradients[name], progress=progress)
            for name, group in self.network.groups.items()
        }
        for each in self.averagers.values():
            each.agree()
        self.shards = Shards(self.network, groups.shard_holders, progress)

    def take(self, *, keep: bool = True) -> CheckpointContent:
        return snapshot.take(self.network, self.averagers, self.shards, POSITION, {"ranks": 1}, keep=keep)

    def put(self, content: CheckpointContent) -> Position:
        return snapshot.put(content, self.network, self.averagers, self.shards)


def alone(model: Layer) -> CheckpointContent:
    """A snapshot of one rank, with random numbers for its tensors."""
    random = np.random.default_rng(0)
    found = run_virtual(1, lambda comm: Trained(comm, model, ParallelPlan(), Blocking).take())[0]
    return CheckpointContent({key: random.standard_normal(value.shape) for key, value in found.tensors.items()}, found.meta)


@pytest.mark.parametrize("averager", AVERAGERS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("default", list(Parallelism))
def test_what_is_put_is_taken_again(net: str, averager: str, default: Parallelism) -> None:
    """Up to more ranks than channels, so that some hold nothing."""
    content = alone(NETS[net]())

    def again(comm: ThreadCommunicator, plan: ParallelPlan) -> CheckpointContent:
        trained = Trained(comm, NETS[net](), plan, AVERAGERS[averager])
        assert trained.put(content) == POSITION
        return trained.take(keep=comm.rank == 0)

    use = MIXED[net] if default is Parallelism.BATCH else {}
    for rows, cols in GRIDS:
        plan = ParallelPlan(rows, cols, default, use)
        first, *others = run_virtual(rows * cols, partial(again, plan=plan), seed=rows)
        assert first.meta == content.meta
        assert first.tensors.keys() == content.tensors.keys()
        for key, value in content.tensors.items():
            assert np.array_equal(first.tensors[key], value), f"{key} on {rows} x {cols}"
        assert all(not other.tensors for other in others)


def test_each_rank_takes_its_part() -> None:
    content = alone(nets.plain())

    def weights(comm: ThreadCommunicator) -> np.ndarray:
        trained = Trained(comm, nets.plain(), ParallelPlan(3, 1, Parallelism.MODEL), Blocking)
        snapshot.put_weights(content, trained.network, trained.shards)
        return trained.network.parameters["fc1.weight"].data.copy()

    whole = content.tensors["parameters/fc1.weight"]  # (72, 11)
    for part, columns in zip(run_virtual(3, weights), (slice(0, 4), slice(4, 8), slice(8, 11)), strict=True):
        assert np.array_equal(part, whole[:, columns])


def test_a_snapshot_of_another_model_is_refused_by_its_whole_shape() -> None:
    content = alone(nets.plain(classes=6))

    def put(comm: ThreadCommunicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            Trained(comm, nets.plain(), ParallelPlan(2, 1, Parallelism.MODEL), Blocking).put(content)
        return str(caught.value)

    for message in run_virtual(2, put):
        assert "parameters/fc2.weight has shape (11, 6) in the checkpoint and (11, 5) here" in message


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3)])
def test_lazy_starts_with_empty_sums_where_others_kept_none(rows: int, cols: int) -> None:
    content = alone(nets.plain())

    def taken(comm: ThreadCommunicator) -> CheckpointContent:
        trained = Trained(comm, nets.plain(), ParallelPlan(rows, cols), partial(Lazy, layers=2, bucket_bytes=512))
        trained.put(content)
        return trained.take()

    for again in run_virtual(rows * cols, taken):
        added = {key for key in again.tensors if key.startswith("optimizer/lazy_gradient/")}
        assert len(added) == 4
        assert not any(np.any(again.tensors[key]) for key in added)
        for key, value in content.tensors.items():
            assert np.array_equal(again.tensors[key], value), key


@pytest.mark.parametrize("other", [Blocking, partial(Sharded, fc_exchange="never"), partial(Lazy, layers=1, bucket_bytes=512)])
def test_gradients_that_lazy_has_added_up_are_never_dropped(other: Callable[..., GradientAverager]) -> None:
    random = np.random.default_rng(0)
    lazy = partial(Lazy, layers=2, bucket_bytes=512)
    empty = run_virtual(1, lambda comm: Trained(comm, nets.plain(), ParallelPlan(), lazy).take())[0]
    key = "optimizer/lazy_gradient/conv2.weight"
    full = CheckpointContent({**empty.tensors, key: random.standard_normal(empty.tensors[key].shape)}, empty.meta)

    def put(comm: ThreadCommunicator, content: CheckpointContent) -> Position:
        return Trained(comm, nets.plain(), ParallelPlan(1, 2), other).put(content)

    assert run_virtual(2, partial(put, content=empty)) == [POSITION, POSITION]
    with pytest.raises(CheckpointError, match=r"averager lazy has added up gradients of 1 parameters \(conv2.weight first\)"):
        run_virtual(2, partial(put, content=full))


def test_momentum_without_a_place_is_never_dropped() -> None:
    content = alone(nets.plain())
    stray = CheckpointContent({**content.tensors, "optimizer/other/conv1.weight": np.ones(3)}, content.meta)
    with pytest.raises(CheckpointError, match=r"holds the other of 1 parameters \(conv1.weight first\)"):
        run_virtual(1, lambda comm: Trained(comm, nets.plain(), ParallelPlan(), Blocking).put(stray))


def test_positions_of_the_first_format_counted_steps():
    sums = {"loss": 1.5, "top1": 4, "top5": 5, "count": 48}
    meta = {"position": {"epoch": 2, "step_in_epoch": 3, "global_step": 17, "sums": sums}}
    assert Position.from_meta(meta) == Position(2, 48, 17, RunningSums(**sums))


def test_a_position_in_steps_is_whole_where_all_steps_were_alike():
    for samples, batch in ((75, 16), (64, 16), (7, 9)):
        steps = -(-samples // batch)
        for epoch, step in ((0, 0), (2, 0), (5, steps - 1)):
            assert Position(epoch, step * batch).in_steps(samples, batch) == epoch * steps + step
    assert Position(1, 8).in_steps(75, 16) == 5.5
