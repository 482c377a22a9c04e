"""Every operation of the MPI communicator, also of devices and in 16 bits, equals its definition over what all ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import Strategy
from hpctrain.averaging.sixteen_bits import caster
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator, Handle, raise_on_all_ranks
from hpctrain.comm.groups import GridAxis, ProcessGrid, in_levels, levels
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.sums import Wire, sums_over
from hpctrain.comm.transports import Transport, reaching
from hpctrain.core.errors import DataError, ShapeError
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import RankStatistics
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import OPTIMIZERS, Watched, averaged, make_group, run_steps
from tests.support.bfloat16 import rounded
from tests.support.device_operations import OPERATIONS, DeviceRank
from tests.support.emulated import EmulatedDeviceFactory, kernels_on
from tests.support.training import Task, distance, train

RANKS = [1, 2, 3, 4]
DTYPES = ["float32", "float64", "int32", "int64", "uint8", "uint16"]


def _values(rank: int, size: int, dtype: str) -> np.ndarray:
    """What rank `rank` holds; small whole numbers, so that sums are exact in every type and order."""
    return np.random.default_rng((rank, size)).integers(0, 50, size).astype(dtype)


def _counts(size: int, seed: int = 0) -> list[int]:
    """Uneven parts, one of them empty where there are several."""
    counts = [7 * r + 3 for r in range(size)]
    if size > 1:
        counts[seed % size] = 0
    return counts


def _wait(progress: ProgressEngine, handle: Handle) -> None:
    progress.wait_handle(handle, "test")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 225])
@pytest.mark.parallel(RANKS)
def test_allreduce_sums_in_place(world: Communicator, progress: ProgressEngine, elements: int, dtype: str) -> None:
    buffer = _values(world.rank, elements, dtype)
    _wait(progress, world.iallreduce(buffer))
    expected = np.sum([_values(r, elements, dtype) for r in range(world.size)], axis=0).astype(dtype)
    np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parallel(RANKS)
def test_reduce_scatter_returns_its_part_on_each_rank(
    world: Communicator, progress: ProgressEngine, empty: int, dtype: str
) -> None:
    counts = _counts(world.size, empty)
    recv = np.zeros(counts[world.rank], dtype)
    _wait(progress, world.ireduce_scatter(_values(world.rank, sum(counts), dtype), recv, counts))
    total = np.sum([_values(r, sum(counts), dtype) for r in range(world.size)], axis=0).astype(dtype)
    begin = sum(counts[: world.rank])
    np.testing.assert_array_equal(recv, total[begin : begin + recv.size])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parallel(RANKS)
def test_allgather_joins_parts_in_rank_order(world: Communicator, progress: ProgressEngine, dtype: str, in_place: bool) -> None:
    counts = _counts(world.size, 1)
    mine = _values(world.rank, counts[world.rank], dtype)
    recv = np.zeros(sum(counts), dtype)
    if in_place:
        begin = sum(counts[: world.rank])
        recv[begin : begin + mine.size] = mine
    _wait(progress, world.iallgather(None if in_place else mine, recv, counts))
    np.testing.assert_array_equal(recv, np.concatenate([_values(r, counts[r], dtype) for r in range(world.size)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parallel(RANKS)
def test_all_to_all_transposes(world: Communicator, progress: ProgressEngine, dtype: str) -> None:
    def part(source: int, dest: int) -> np.ndarray:
        return _values(10 * source + dest, (3 * source + 2 * dest) % 5, dtype)

    ranks = range(world.size)
    send, expected = [part(world.rank, r) for r in ranks], [part(r, world.rank) for r in ranks]
    recv = np.zeros(sum(p.size for p in expected), dtype)
    handle = world.ialltoall(np.concatenate(send), recv, [p.size for p in send], [p.size for p in expected])
    _wait(progress, handle)
    np.testing.assert_array_equal(recv, np.concatenate(expected))


@pytest.mark.mpi_differs
@pytest.mark.parallel(RANKS)
def test_all_to_all_in_one_memory_where_some_send_or_receive_nothing(world: Communicator, progress: ProgressEngine) -> None:
    ranks = range(world.size)
    memory = np.zeros(12 * world.size)
    for sender in ranks:  # one rank to all others, then all others to it: empty buffers begin where full ones do
        for sends in ([r == sender for r in ranks], [r != sender for r in ranks]):
            out = [3 if sends[world.rank] and not sends[r] else 0 for r in ranks]
            into = [3 if sends[r] and not sends[world.rank] else 0 for r in ranks]
            send, recv = memory[: sum(out)], memory[sum(out) : sum(out) + sum(into)]
            send[...], recv[...] = world.rank + 1, 0
            _wait(progress, world.ialltoall(send, recv, out, into))
            np.testing.assert_array_equal(recv, np.repeat(np.arange(world.size) + 1.0, into))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parallel(RANKS)
def test_broadcast_from_every_root(world: Communicator, progress: ProgressEngine, dtype: str) -> None:
    for root in range(world.size):
        buffer = _values(world.rank, 9, dtype)
        _wait(progress, world.ibroadcast(buffer, root))
        np.testing.assert_array_equal(buffer, _values(root, 9, dtype))


@pytest.mark.mpi_differs
@pytest.mark.parallel(RANKS)
def test_messages_match_by_tag(world: Communicator, progress: ProgressEngine) -> None:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    received = {tag: np.zeros(tag, np.float32) for tag in (5, 0, 7)}
    queue = progress.queue(world)
    tickets = [
        queue.post(lambda tag=tag, buffer=buffer: world.irecv(buffer, left, tag), "receive") for tag, buffer in received.items()
    ]
    for tag in (7, 5, 0):
        sent = _values(world.rank, tag, "float32")
        tickets.append(queue.post(lambda sent=sent, tag=tag: world.isend(sent, right, tag), "send"))
    progress.wait(tickets)
    for tag, buffer in received.items():
        np.testing.assert_array_equal(buffer, _values(left, tag, "float32"))


@pytest.mark.parallel([2, 3])
def test_strided_buffers_are_refused(world: Communicator) -> None:
    strided = np.zeros((4, 4))[:, 1]
    with pytest.raises(AssertionError, match="contiguous"):
        world.iallreduce(strided)
    with pytest.raises(AssertionError, match="contiguous"):
        world.isend(strided, 0, 0)


@pytest.mark.mpi_differs
@pytest.mark.parallel(RANKS)
def test_float_sums_repeat_and_agree_bit_by_bit(world: Communicator, progress: ProgressEngine) -> None:
    """Rounding depends on the order of a sum: whichever rank comes late, the order stays."""
    source = np.random.default_rng(world.rank).standard_normal(20011).astype(np.float32) * np.float32(3.0) ** world.rank
    counts = [source.size // world.size + (r < source.size % world.size) for r in range(world.size)]
    sums, parts = set(), set()
    for turn in range(2 * world.size):
        if turn % world.size == world.rank:  # late by some computing
            np.linalg.norm(np.random.default_rng(turn).standard_normal((200, 200)))
        total, part = source.copy(), np.zeros(counts[world.rank], np.float32)
        _wait(progress, world.iallreduce(total))
        _wait(progress, world.ireduce_scatter(source, part, counts))
        sums.add(total.tobytes())
        parts.add(part.tobytes())
    assert len(sums) == len(parts) == 1
    assert len(set(world.allgather_object(sums.pop()))) == 1


@pytest.mark.mpi_differs
@pytest.mark.parallel(RANKS)
def test_objects(world: Communicator) -> None:
    value = {"rank": world.rank, "long": "x" * 1000 * world.rank, "none": None}
    gathered = world.allgather_object(value)
    assert [g["rank"] for g in gathered] == list(range(world.size))
    assert [len(g["long"]) for g in gathered] == [1000 * r for r in range(world.size)]
    for root in range(world.size):
        assert world.broadcast_object(("from", world.rank), root) == ("from", root)


@pytest.mark.mpi_differs
@pytest.mark.parallel(RANKS)
def test_splits_by_color_key_and_node(world: Communicator) -> None:
    part = world.split(world.rank % 2, -world.rank, "parity")
    assert part is not None
    members = [r for r in range(world.size) if r % 2 == world.rank % 2][::-1]
    assert (part.name, part.size, part.rank) == ("parity", len(members), members.index(world.rank))
    assert part.allgather_object(world.rank) == members
    part = world.split(0 if world.rank == 0 else None, 0, "first")
    assert (part is None) == (world.rank != 0)
    node = world.split_shared_memory("node")
    assert (node.rank, node.size) == (world.rank, world.size)


@pytest.mark.mpi_differs
@pytest.mark.parallel(RANKS)
def test_one_ranks_error_is_everyones(world: Communicator) -> None:
    for failing in range(world.size):

        def work(failing: int = failing) -> int:
            if world.rank == failing:
                raise DataError(f"file {failing} is missing")
            return world.rank

        with pytest.raises(DataError, match=f"^file {failing} is missing") as caught:
            raise_on_all_ranks(world, work)
        assert (f"(on rank {failing} of {world.size})" in str(caught.value)) == (world.size > 1)
    assert raise_on_all_ranks(world, lambda: world.rank) == world.rank


def _sum(progress: ProgressEngine, comm: Communicator, value: float) -> float:
    buffer = np.array([value])
    progress.wait(progress.queue(comm).post(lambda: comm.iallreduce(buffer), "test"))
    return float(buffer[0])


@pytest.mark.mpi_differs
@pytest.mark.parallel([1, 2, 3, 4])
def test_every_rank_is_in_a_split_group_and_a_data_group(world: Communicator, progress: ProgressEngine) -> None:
    for rows in (n for n in range(1, world.size + 1) if world.size % n == 0):
        cols = world.size // rows
        grid = ProcessGrid(world, rows, cols)
        assert world.rank == grid.col * rows + grid.row  # one node: split group after split group
        split, data = grid.along(GridAxis.SPLIT), grid.along(GridAxis.DATA)
        assert (split.size, split.rank, data.size, data.rank) == (rows, grid.row, cols, grid.col)
        sums = _sum(progress, split, 10.0**grid.row), _sum(progress, data, 10.0**grid.col)
        assert sums[0] == sum(10.0**r for r in range(rows))
        assert sums[1] == sum(10.0**c for c in range(cols))


@pytest.mark.parallel([2, 3, 4])
def test_a_wrong_grid_is_refused_on_every_rank(world: Communicator) -> None:
    with pytest.raises(ShapeError, match=rf"grid.rows \* grid.cols must be {world.size}"):
        ProcessGrid(world, 1, world.size + 1)


@pytest.mark.parallel([1, 2, 3, 4])
def test_uneven_shares(world: Communicator, progress: ProgressEngine) -> None:
    own = world.split(0, world.rank, "statistics")
    assert own is not None
    merger = RankStatistics(own, progress)
    counts = [5 * rank for rank in range(world.size)]  # rank 0 has none
    parts = [1e4 + np.random.default_rng(rank).standard_normal((count, 9)) for rank, count in enumerate(counts)]
    mine = parts[world.rank]
    mean = mine.mean(axis=0) if len(mine) else np.full(9, np.nan)
    m2 = ((mine - mean) ** 2).sum(axis=0)
    assert merger.merge(len(mine), mean, m2) == sum(counts)
    assert len(set(world.allgather_object((mean.tobytes(), m2.tobytes())))) == 1
    everything = np.concatenate(parts)
    if len(everything):
        np.testing.assert_allclose(mean, everything.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(m2, len(everything) * everything.var(axis=0), rtol=1e-10)
    values = np.array([world.rank, 1.0])
    merger.sum(values)
    np.testing.assert_array_equal(values, [world.size * (world.size - 1) / 2, world.size])


ROUNDING: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 100}),
    "sharded": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "replan": False, "wire_parameters": "bfloat16"}),
}


def _normal_values(rank: int, size: int) -> np.ndarray:
    return (np.random.default_rng(rank).standard_normal(size) * 3).astype(np.float32)


@pytest.mark.mpi_differs
@pytest.mark.parametrize("counts", [[5, 0, 3, 4], [0, 0, 0, 0], [0, 1, 0, 0], [70_000, 70_001, 69_999, 70_000]])
@pytest.mark.parallel([2, 3, 4])
def test_sums_are_those_of_rounded_parts(world: Communicator, progress: ProgressEngine, counts: list[int]) -> None:
    """Parts without elements included, whose messages have neither bytes nor an address of their own."""
    counts = counts[: world.size]
    size = sum(counts)
    total = rounded(_normal_values(0, size))
    for rank in range(1, world.size):
        total = total + rounded(_normal_values(rank, size))
    start, stop = list(pairwise(accumulate(counts, initial=0)))[world.rank]
    sums = sums_over(world, caster("bfloat16"), allreduces=True)
    for _ in range(3):  # with the same buffers
        received, whole = np.full(stop - start, np.nan, np.float32), _normal_values(world.rank, size)
        handles = [sums.ireduce_scatter(whole, received, counts), sums.iallreduce(whole)]
        norms = np.array([1.0 + 2.0**-40])
        handles.append(world.iallreduce(norms))
        for handle in handles:
            progress.wait_handle(handle, "sums")
        assert received.tobytes() == total[start:stop].tobytes()
        assert whole.tobytes() == rounded(total).tobytes()
        assert norms[0] == world.size * (1.0 + 2.0**-40)


@pytest.mark.parallel(4)
def test_in_two_levels(world: Communicator, progress: ProgressEngine) -> None:
    nodes, size = (0, 0, 1, 1), 24
    made = in_levels(world, levels(nodes), "gradients")
    sums = sums_over(made, caster("bfloat16"), allreduces=True)
    of_nodes = [_normal_values(first, size) + _normal_values(first + 1, size) for first in (0, 2)]
    expected = rounded(of_nodes[0]) + rounded(of_nodes[1])
    for _ in range(3):  # with the same buffers
        received, whole = np.empty(size // 4, np.float32), _normal_values(world.rank, size)
        handles = sums.ireduce_scatter(_normal_values(world.rank, size), received, [size // 4] * 4), sums.iallreduce(whole)
        for handle in handles:
            progress.wait_handle(handle, "sums")
        assert whole.tobytes() == rounded(expected).tobytes()
    assert received.tobytes() == expected[made.rank * received.size :][: received.size].tobytes()


@pytest.mark.mpi_differs
@pytest.mark.sample(4)
@pytest.mark.parametrize("threaded", [False, True], ids=["alone", "progress thread"])
@pytest.mark.parametrize("wire", ["bfloat16"])
@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parallel([2, 3, 4])
def test_strategies_end_with_the_bits_of_virtual_ranks(
    world: Communicator, progress: ProgressEngine, name: str, wire: Wire, threaded: bool
) -> None:
    kind, options = ROUNDING[name]
    nodes = (0, 0, 1, 1) if name != "blocking" and world.size == 4 else None

    def trained(comm: Communicator, engine: ProgressEngine) -> np.ndarray:
        averager = averaged(kind, make_group(), OPTIMIZERS["momentum"](), comm, engine, nodes=nodes, wire=wire, **options)
        return run_steps(Watched(averager), 6)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        return trained(comm, virtual_engine(comm))

    expected = run_virtual(world.size, program)[0]
    if threaded:
        progress.start_thread()
    try:
        found = trained(world, progress)
    finally:
        progress.stop_thread()
    assert found.tobytes() == expected.tobytes()  # two ranks of a node add two numbers, in any order
    texts = world.allgather_object(found.tobytes())
    assert len(set(texts)) == 1


WAYS: tuple[Transport, ...] = ("staged", "mpi", "nccl")


@pytest.mark.mpi_differs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parallel([2, 3, 4])
def test_operations_bring_what_they_bring_on_the_host(
    world: Communicator, way: Transport, emulated_device: EmulatedDeviceFactory
) -> None:
    rank = DeviceRank(world, emulated_device(world.rank), lambda comm, arithmetic: reaching(way, comm, arithmetic))
    for operation in OPERATIONS:
        for _ in range(3):
            array, expected = operation(rank)
            found = array if isinstance(array, np.ndarray) else rank.on_host(array)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [Sharded, Bucketed])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parallel([2, 3])
def test_a_training_is_that_of_one_rank_of_numpy(
    world: Communicator,
    progress: ProgressEngine,
    way: Transport,
    strategy: Callable[..., Any],
    emulated_device: EmulatedDeviceFactory,
) -> None:
    task = Task(nets.residual, NumpyKernelSet(), lambda: Sgd(momentum=0.9, weight_decay=1e-3), steps=5, transport=way)
    device: EmulatedDevice = emulated_device(world.rank)
    kernels = kernels_on(device)
    result = train(replace(task, kernels=kernels), world, progress, strategy, nominal_batch=task.batch, bucket_bytes=2000)
    expected = train(task, *lone_rank(), strategy, nominal_batch=task.batch, bucket_bytes=2000)
    assert distance(result.parameters, expected.parameters) <= 1e-10
    device.finish()
