"""Sharded checkpoints across grids: what any ranks write, any others read, bit by bit, and of no more shards than they need."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.lazy import Lazy, LazyOptions
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.boxes import whole
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage import checkpoint, write_shares
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, open_checkpoint, read, write
from hpctrain.storage.shard_file import write_shard
from hpctrain.storage.sharded_checkpoint import publish, unfinished
from hpctrain.storage.sharded_tensors import ShardedTensors
from hpctrain.train.replica import StrategyFactory
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support import nets
from tests.train.test_snapshot import POSITION, alone, replica

pytestmark = pytest.mark.usefixtures("small_parts_are_shared")

SPLIT = {"conv1": Parallelism.DOMAIN, "conv2": Parallelism.MODEL, "fc*": Parallelism.MODEL}
GRIDS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (2, 2), (4, 1)]
SHARDED = partial(Sharded, options=ShardedOptions(fc_exchange="never"))


@pytest.fixture
def small_parts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_shares, "_SMALLEST_SHARED_BYTES", 300)


def plan_of(rows: int, cols: int) -> ParallelPlan:
    return ParallelPlan(rows, cols, Parallelism.BATCH, SPLIT if rows > 1 else {})


def save(
    comm: ThreadCommunicator, content: CheckpointContent, grid: tuple[int, int], path: Path, strategy: StrategyFactory
) -> None:
    """Each rank of that grid writes its share of a content to a shard."""
    trained = replica(comm, nets.plain(), plan_of(*grid), strategy)
    trained.load(content)
    parts, meta = trained.own_parts(POSITION, {"ranks": 1})
    growing = unfinished(path, "t")
    shards = comm.allgather_object(write_shard(growing, comm.rank, parts))
    if comm.rank == 0:
        publish(growing, path, shards, meta)
    comm.allgather_object(None)


def load(comm: ThreadCommunicator, path: Path, grid: tuple[int, int], strategy: StrategyFactory) -> CheckpointContent:
    trained = replica(comm, nets.plain(), plan_of(*grid), strategy)
    assert trained.load(open_checkpoint(path)) == POSITION
    return trained.state(POSITION, {"ranks": 1}, copied=True)


def assert_same(left: CheckpointContent, right: CheckpointContent) -> None:
    assert left.meta == right.meta
    assert set(left.tensors) == set(right.tensors)
    for key, values in right.tensors.items():
        assert np.array_equal(left.tensors[key], values), key
        assert left.tensors[key].dtype == values.dtype


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "readers"), [(Blocking, GRIDS), (SHARDED, [(1, 3), (2, 2)])], ids=["blocking", "sharded"])
def test_any_ranks_read_what_any_others_wrote(tmp_path: Path, strategy: StrategyFactory, readers: list[tuple[int, int]]) -> None:
    """In a single file, too, and from one to the other."""
    content = alone(nets.plain())
    for number, grid in enumerate(GRIDS):
        path, single = checkpoint_path(tmp_path, number, sharded=True), checkpoint_path(tmp_path, number)
        run_virtual(grid[0] * grid[1], partial(save, content=content, grid=grid, path=path, strategy=strategy), seed=number)
        stored = read(path)
        assert_same(stored, content)
        write(single, stored)
        for source, grids in ((path, readers), (single, [readers[number % len(readers)]])):
            for other in grids:
                ranks = other[0] * other[1]
                for taken in run_virtual(ranks, partial(load, path=source, grid=other, strategy=strategy)):
                    assert_same(taken, content)


def test_each_element_is_written_once_and_shares_are_even(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 7, sharded=True)
    run_virtual(4, partial(save, content=alone(nets.plain()), grid=(2, 2), path=path, strategy=Blocking))
    sizes = [sum(part.size for part in _parts(path, rank)) for rank in range(4)]
    assert sum(sizes) == sum(values.size for values in read(path).tensors.values())
    assert max(sizes) < 1.4 * min(sizes)


def _parts(path: Path, rank: int) -> list[np.ndarray]:
    return list(checkpoint.read_store(path / f"shard-{rank:05d}.h5")[0].values())


def test_a_part_opens_the_shards_that_have_it_only(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 7, sharded=True)
    run_virtual(4, partial(save, content=alone(nets.plain()), grid=(1, 4), path=path, strategy=Blocking))
    tensors = open_checkpoint(path).tensors
    assert isinstance(tensors, ShardedTensors)
    expected = tensors["parameters/fc1.weight"]
    tensors.close()
    for rank in (0, 2, 3):
        (path / f"shard-{rank:05d}.h5").rename(path / f"moved-{rank}")
    begin, stop = 72 // 4, 2 * 72 // 4
    box = ((begin, stop), whole(expected.shape)[1])
    assert np.array_equal(tensors.part("parameters/fc1.weight", box), expected[begin:stop])


def test_what_ranks_keep_back_is_each_ones_own(tmp_path: Path) -> None:
    strategy = partial(Lazy, options=LazyOptions(layers=2, bucket_bytes=512))
    kept = run_virtual(3, partial(_lazy, path=checkpoint_path(tmp_path, 7, sharded=True), strategy=strategy))
    assert_same(kept[1], kept[0])
    assert_same(read(checkpoint_path(tmp_path, 7, sharded=True)), kept[0])
    pending = [key for key in kept[0].tensors if "lazy_gradient" in key]
    assert any(len(np.unique(kept[0].tensors[key])) > 1 for key in pending)


def _lazy(comm: ThreadCommunicator, path: Path, strategy: StrategyFactory) -> CheckpointContent:
    trained = replica(comm, nets.plain(), plan_of(1, 3), strategy)
    for averager in trained.averagers.values():
        for gradients in averager.held_gradients().values():
            gradients[...] = np.random.default_rng(comm.rank).standard_normal(gradients.shape)
    parts, meta = trained.own_parts(POSITION, {"ranks": 1})
    shards = comm.allgather_object(write_shard(unfinished(path, "t"), comm.rank, parts))
    if comm.rank == 0:
        publish(unfinished(path, "t"), path, shards, meta)
    return trained.state(POSITION, {"ranks": 1}, copied=True)
