"""Moves between ranks: transfers, operators against their adjoints, and groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Array, Buffers, KernelSet, Operator, RecomputedOutput, StepContext
from hpctrain.backend.specs import ReluSpec, TensorSpec
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.groups import ProcessGrid
from hpctrain.core.intervals import even_intervals, relative, shape_of, size_of, slices, whole
from hpctrain.data.loader import cut
from hpctrain.parallel import layout
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import (
    NothingSpec,
    PartialMeanSpec,
    RedistributeSpec,
    ReduceScatterSpec,
    SplitGroup,
    moved,
    moved_back,
    transfer,
)
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.distributed import random_moves
from tests.support.emulated import EmulatedDeviceFactory, kernels_on


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_pieces_put_together_are_the_target(ranks: int) -> None:
    for source, target in random_moves(ranks, ranks, 60):
        x = np.random.default_rng(0).standard_normal(source.shape)
        transfers = [transfer(source, target, rank) for rank in range(ranks)]
        for rank, mine in enumerate(transfers):
            y = cut(x, target.boxes[rank])
            found, seen = np.zeros_like(y), np.zeros(y.shape, int)
            if mine.local is not None:
                found[slices(mine.local[1])] = x[relative(source.boxes[rank], whole(x.shape))][slices(mine.local[0])]
                seen[slices(mine.local[1])] += 1
            for piece in mine.receives:
                (theirs,) = [each for each in transfers[piece.peer].sends if each.peer == rank]
                assert theirs.shape == piece.shape
                found[slices(piece.box)] = x[relative(source.boxes[piece.peer], whole(x.shape))][slices(theirs.box)]
                seen[slices(piece.box)] += 1
            np.testing.assert_array_equal(found, y)
            assert seen.max(initial=0) <= 1
            assert mine.gaps == bool((seen == 0).any())
            kept = np.zeros([stop - start for start, stop in source.boxes[rank]], int)
            if mine.local is not None:
                kept[slices(mine.local[0])] = 1
            assert mine.spare == bool((kept == 0).any())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_pieces_are_contiguous_and_add_up(ranks: int) -> None:
    for source, target in random_moves(50 + ranks, ranks, 60):
        transfers = [transfer(source, target, rank) for rank in range(ranks)]
        for pieces in (pieces for each in transfers for pieces in (each.sends, each.receives)):
            assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
            assert all(piece.stop - piece.start == np.prod(piece.shape) > 0 for piece in pieces)
            assert [piece.peer for piece in pieces] == sorted({piece.peer for piece in pieces})
        assert moved(source, target) == tuple(each.send_size for each in transfers)
        assert moved_back(source, target) == tuple(each.receive_size for each in transfers)
        assert sum(moved(source, target)) == sum(moved_back(source, target))


RANKS = [2, 3, 4, 6]
_DTYPE = "float64"


@dataclass
class Pass:
    """One rank's forward and backward: all four tensors, and what the input's gradient held before."""

    x: np.ndarray
    y: np.ndarray
    dy: np.ndarray
    dx: np.ndarray
    before: np.ndarray
    recomputed: np.ndarray


def _bound(
    spec: RedistributeSpec | ReduceScatterSpec | PartialMeanSpec | NothingSpec, x: np.ndarray, seed: int, accumulate: bool
) -> Operator:
    """The operator on memory of its own, full of NaN where it has to write."""
    random = np.random.default_rng(seed)
    inputs = (TensorSpec(x.shape, _DTYPE),)
    operator = spec.operator(inputs, training=True)
    shape = operator.output.shape
    operator.bind(
        Buffers(
            inputs=(x,),
            output=np.full(shape, np.nan),
            input_grads=(random.standard_normal(x.shape) if accumulate else np.full(x.shape, np.nan),),
            output_grad=random.standard_normal(shape),
            accumulate=(accumulate,),
            saved=np.full(operator.saved_bytes, 0xFF, np.uint8) if operator.saved_bytes else None,
        )
    )
    return operator


def _pass(operator: Operator, *, early: bool = False) -> Pass:
    buffers = operator.buffers
    before = buffers.input_grads[0].copy()
    operator.forward(StepContext())
    y = buffers.output.copy()
    if isinstance(operator, RecomputedOutput) and operator.recomputes_output:
        buffers.output[...] = np.nan
        operator.recompute_output()
    if early:
        operator.begin_backward()
    dy = buffers.output_grad.copy()
    operator.backward_input()
    np.testing.assert_array_equal(dy, buffers.output_grad)
    return Pass(buffers.inputs[0], y, dy, buffers.input_grads[0], before, buffers.output)


def _product(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    return float(sum((a * b).sum() for a, b in pairs))


def _check_adjoint(passes: list[Pass], accumulate: bool) -> None:
    forward = _product([(each.y, each.dy) for each in passes])
    backward = _product([(each.x, each.dx - each.before if accumulate else each.dx) for each in passes])
    assert forward == pytest.approx(backward, rel=1e-11, abs=1e-11)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_moves(ranks: int, early: bool, seed: int | None) -> None:
    moves = random_moves(ranks, ranks, 40)
    tensors = [np.random.default_rng(number).standard_normal(source.shape) for number, (source, _) in enumerate(moves)]

    def program(comm: ThreadCommunicator) -> list[Pass]:
        group = SplitGroup(comm, virtual_engine(comm))
        found = []
        for number, ((source, target), x) in enumerate(zip(moves, tensors, strict=True)):
            mine = x[relative(source.boxes[comm.rank], whole(x.shape))].copy()
            spec = RedistributeSpec(source, target, comm.rank, "move", group)
            found.append(_pass(_bound(spec, mine, 1000 * number + comm.rank, number % 2 == 1), early=early))
        return found

    results = run_virtual(ranks, program, seed=seed)
    for number, ((_, target), x) in enumerate(zip(moves, tensors, strict=True)):
        passes = [result[number] for result in results]
        for rank, each in enumerate(passes):
            np.testing.assert_array_equal(each.y, cut(x, target.boxes[rank]))
            np.testing.assert_array_equal(each.y, each.recomputed)
        _check_adjoint(passes, accumulate=number % 2 == 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_sums_of_partial_tensors(ranks: int) -> None:
    targets = [source for source, _ in random_moves(100 + ranks, ranks, 40)]

    def partial(number: int, rank: int) -> np.ndarray:
        return np.random.default_rng([number, rank]).standard_normal(targets[number].shape)

    def program(comm: ThreadCommunicator) -> list[Pass]:
        group = SplitGroup(comm, virtual_engine(comm))
        found = []
        for number, target in enumerate(targets):
            spec = ReduceScatterSpec(target, layout.everything(target.shape, ranks), comm.rank, "sum", group)
            found.append(_pass(_bound(spec, partial(number, comm.rank), number + 7 * comm.rank, False)))
        return found

    results = run_virtual(ranks, program)
    for number, target in enumerate(targets):
        total = np.sum([partial(number, rank) for rank in range(ranks)], axis=0)
        passes = [result[number] for result in results]
        for rank, each in enumerate(passes):
            np.testing.assert_allclose(each.y, total[relative(target.boxes[rank], whole(total.shape))], rtol=1e-12, atol=1e-12)
        _check_adjoint(passes, accumulate=False)


@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (3, 0, 5, 2), (0, 4, 5, 2)])
def test_partial_means(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape)
    found = _pass(_bound(PartialMeanSpec(elements=40), x, 3, False))
    np.testing.assert_allclose(found.y, x.sum(axis=(1, 2), keepdims=True) / 40)
    _check_adjoint([found], accumulate=False)


def test_nothing_has_no_output_and_passes_back_zeros() -> None:
    found = _pass(_bound(NothingSpec(ReluSpec(), (3, 4, 5, 0)), np.ones((3, 4, 5, 2)), 0, False))
    assert found.y.size == 0
    assert not found.dx.any()


@pytest.mark.parametrize("ranks", RANKS)
def test_little_is_rebuilt_and_much_is_kept(ranks: int) -> None:
    """A halo is put around the tile again in backward; what was gathered is kept."""
    shape = (2, 8 * ranks, 4, 3)
    tiles = layout.tiles(shape, (ranks, 1))
    rows = [(max(0, box[1][0] - 1), min(shape[1], box[1][1] + 1)) for box in tiles.boxes]
    halo = layout.needed(shape, [(box[0], own, *box[2:]) for box, own in zip(tiles.boxes, rows, strict=True)])

    def program(comm: ThreadCommunicator) -> tuple[bool, int, bool]:
        group = SplitGroup(comm, virtual_engine(comm))
        x = TensorSpec(shape_of(tiles.boxes[comm.rank]), _DTYPE)
        around = RedistributeSpec(tiles, halo, comm.rank, "halo", group).operator((x,), training=True)
        gather = RedistributeSpec(tiles, layout.everything(shape, ranks), comm.rank, "gather", group).operator(
            (x,), training=True
        )
        return around.recomputes_output, around.saved_bytes, gather.recomputes_output

    for rank, (rebuilds, saved, keeps) in enumerate(run_virtual(ranks, program)):
        assert (rebuilds, keeps) == (True, False)
        assert saved == 8 * (size_of(halo.boxes[rank]) - size_of(tiles.boxes[rank]))


def _tall(ranks: int) -> list[tuple[Layout, Layout]]:
    """Images of 225 rows with the halo of a window of 7, and of 7 rows whose channels, 225, are gathered."""
    tall, wide = (1, 225, 3, 2), (2, 7, 1, 225)
    rows = layout.tiles(tall, (ranks, 1))
    halo = [(box[0], (box[1][0] - 3, box[1][1] + 3), *box[2:]) for box in rows.boxes]
    return [
        (rows, layout.needed(tall, halo)),
        (layout.channels(wide, even_intervals(225, ranks)), layout.everything(wide, ranks)),
    ]


def _whole_numbers(seed: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Numbers of which a few add up exactly in any dtype."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float64)


def _results(spec: RedistributeSpec | ReduceScatterSpec, kernels: KernelSet, dtype: str, number: int) -> list[np.ndarray]:
    """The output, as it is recomputed, and the input's gradient: of whole numbers, in arrays of a kernel set."""
    arithmetic, rank, accumulate = kernels.arithmetic, spec.rank, number % 2 == 1

    def put(values: np.ndarray) -> Array:
        array = arithmetic.zeros(values.size, dtype).reshape(values.shape)
        arithmetic.from_host(array, values)
        return array

    shape = spec.target.shape if isinstance(spec, ReduceScatterSpec) else shape_of(spec.source.boxes[rank])
    operator = spec.operator((TensorSpec(shape, dtype),), training=True)
    operator.use(arithmetic)
    grads = put(_whole_numbers([number, rank, 1], shape)), put(_whole_numbers([number, rank, 2], operator.output.shape))
    saved = arithmetic.zeros(operator.saved_bytes, "uint8") if operator.saved_bytes else None
    x, y = put(_whole_numbers([number, rank, 0], shape)), put(np.full(operator.output.shape, np.nan))
    accumulates = (accumulate and isinstance(spec, RedistributeSpec),)
    operator.bind(Buffers((x,), y, grads[:1], grads[1], accumulates, saved=saved))
    operator.forward(StepContext())
    found = [np.array(arithmetic.to_host(y))]
    if isinstance(operator, RecomputedOutput) and operator.recomputes_output:
        arithmetic.fill(y, np.nan)
        operator.recompute_output()
        np.testing.assert_array_equal(found[0], arithmetic.to_host(y))
    operator.backward_input()
    return [*found, np.array(arithmetic.to_host(grads[0]))]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_moves_and_sums_on_devices_are_those_of_the_host(ranks: int, dtype: str, emulated_device: EmulatedDeviceFactory) -> None:
    moves = [*random_moves(200 + ranks, ranks, 25), *_tall(ranks)]

    def program(comm: ThreadCommunicator) -> None:
        others = comm.split(0, comm.rank, "host")
        assert others is not None
        device = emulated_device(10 * ranks + comm.rank)
        on_device = kernels_on(device, dtype)
        engine = virtual_engine(comm)
        group, host_group = SplitGroup(comm, engine, on_device.arithmetic), SplitGroup(others, engine)
        for number, (source, target) in enumerate(moves):
            everything = layout.everything(source.shape, ranks)
            for kind, reader, purpose in ((RedistributeSpec, target, "move"), (ReduceScatterSpec, everything, "sum")):
                found = _results(kind(source, reader, comm.rank, purpose, group), on_device, dtype, number)
                expected = _results(kind(source, reader, comm.rank, purpose, host_group), NumpyKernelSet(), "float64", number)
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(one, other)
        assert on_device.arithmetic.mirrors().pinned_bytes == group.buffer_bytes
        device.finish()

    for seed in range(3):
        run_virtual(ranks, program, seed=seed)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_an_exchange_is_a_transposition(ranks: int) -> None:
    """Piece r of rank q's message is piece q of what rank r has received, whatever the pieces' sizes; some are empty."""
    sizes = np.random.default_rng(ranks).integers(0, 4, (ranks, ranks))

    def program(comm: ThreadCommunicator) -> bool:
        group = SplitGroup(comm, virtual_engine(comm))
        assert (group.rank, group.size) == (comm.rank, comm.size)
        send_counts, recv_counts = sizes[comm.rank].tolist(), sizes[:, comm.rank].tolist()
        send = np.repeat(10.0 * comm.rank + np.arange(ranks), send_counts)
        recv = np.full(sum(recv_counts), -1.0)
        group.wait(group.alltoall(send, recv, send_counts, recv_counts, "pieces"))
        return np.array_equal(recv, np.repeat(10.0 * np.arange(ranks) + comm.rank, recv_counts))

    assert all(run_virtual(ranks, program, seed=1))


def test_the_buffer_grows_and_older_users_keep_theirs() -> None:
    def program(comm: ThreadCommunicator) -> None:
        group = SplitGroup(comm, virtual_engine(comm))
        small = group.reserve(8)
        assert np.shares_memory(group.reserve(5), small)
        small[...] = 7
        large = group.reserve(100)
        assert (large.size, group.buffer_bytes) == (100, 100)
        assert not np.shares_memory(large, small)
        assert small.tolist() == [7] * 8
        assert np.shares_memory(group.reserve(8), large)

    run_virtual(1, program)


def test_waits_for_exchanges_alone_are_counted() -> None:
    def program(comm: ThreadCommunicator) -> None:
        engine = virtual_engine(comm)
        group = SplitGroup(comm, engine)
        others = comm.split(0, comm.rank, "others")
        assert others is not None
        engine.wait_handle(others.ibarrier(), "others")
        assert group.waited_seconds == 0
        x = np.zeros(2)
        group.wait(group.alltoall(x, np.zeros(2), [1, 1], [1, 1], "pieces"))
        assert 0 <= group.waited_seconds <= engine.waited_seconds

    run_virtual(2, program)


@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_every_position_is_in_a_split_group_and_a_data_group(rows: int, cols: int, ranks_per_node: int | None) -> None:
    ranks = rows * cols

    def program(comm: ThreadCommunicator) -> tuple[int, dict[str, list[int]]]:
        groups = GridGroups(ProcessGrid(comm, rows, cols))
        found = {name: group.allgather_object(groups.position) for name, group in groups.gradients.items()}
        found["messages"] = groups.messages.allgather_object(groups.position)
        group = groups.split_group(virtual_engine(comm))
        assert (group is None) == (rows == 1)
        assert group is None or (group.rank, group.size) == (groups.split_rank, rows)
        assert set(groups.mergers(virtual_engine(comm))) == ({"all"} if rows == 1 else {"all", "split", "data"})
        counts = (3, 2, 2, 2, 1, 0)[:ranks]
        assert tuple(groups.counts_of("all", counts)) == counts
        if rows > 1:
            assert list(groups.counts_of("model", counts)) == [sum(counts[k : k + rows]) for k in range(0, ranks, rows)]
        return groups.position, found

    results = run_virtual(ranks, program, ranks_per_node=ranks_per_node)
    assert sorted(position for position, _ in results) == list(range(ranks))
    for position, found in results:
        split_rank, data_rank = position % rows, position // rows
        assert found["all"] == found["messages"] == list(range(ranks))
        if rows > 1:
            assert found["model"] == [split_rank + rows * rank for rank in range(cols)]
            assert found["model"].index(position) == data_rank
        else:
            assert "model" not in found


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_groups_of_one_rank_take_arrays_that_transports_do_not(rows: int, cols: int) -> None:
    def program(comm: ThreadCommunicator) -> None:
        groups = GridGroups(ProcessGrid(comm, rows, cols))
        local = groups.local_where_alone()
        for ours, before in ((local.norms, groups.norms), (local.messages, groups.messages)):
            assert (ours is before) == (rows * cols > 1)
        for name, ours in local.gradients.items():
            assert (ours.size, ours.name) == (groups.gradients[name].size, groups.gradients[name].name)
            assert isinstance(ours, SingleCommunicator) == (ours.size == 1)
        assert local.counts_of("model", (1,) * comm.size) == groups.counts_of("model", (1,) * comm.size)

    run_virtual(rows * cols, program)


@pytest.mark.parametrize(("rows", "cols", "per_node"), [(1, 4, 2), (2, 2, 2), (2, 4, 4), (2, 3, 3)])
def test_nodes_are_those_of_the_ranks_that_average(rows: int, cols: int, per_node: int) -> None:
    """Also where the launcher has dealt out ranks to nodes in turn, so that positions are not ranks."""

    def program(comm: ThreadCommunicator) -> None:
        world = comm.split(0, comm.rank % per_node, "world")
        assert world is not None
        groups = GridGroups(ProcessGrid(world, rows, cols))
        for name, group in groups.gradients.items():
            assert list(groups.nodes[name]) == group.allgather_object(comm.rank // per_node)

    run_virtual(rows * cols, program, ranks_per_node=per_node)
