"""Every communication operator against its adjoint: <A x, y> = <x, A* y>, over all ranks, for all kinds of layouts.

Every element of a partition has one owner and counts once; each copy of what several ranks read has a gradient of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hpctrain.backend.kernels.abilities import RecomputedOutput
from hpctrain.backend.kernels.base import Array, Buffers, KernelSet, Operator, StepContext
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import ReluSpec, TensorSpec
from hpctrain.boxes import even_intervals, relative, shape_of, whole
from hpctrain.data.loader import cut
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.redistribute import NothingSpec, PartialMeanSpec, RedistributeSpec, ReduceScatterSpec
from hpctrain.parallel.split_group import SplitGroup
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.layouts import random_moves

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
    if early:
        operator.begin_forward()
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
            spec = RedistributeSpec(source, target, comm.rank, "move", group, early=early)
            found.append(_pass(_bound(spec, mine, 1000 * number + comm.rank, number % 2 == 1), early=early))
        return found

    results = run_virtual(ranks, program, seed=seed)
    for number, ((_, target), x) in enumerate(zip(moves, tensors, strict=True)):
        passes = [result[number] for result in results]
        for rank, each in enumerate(passes):
            np.testing.assert_array_equal(each.y, cut(x, target.boxes[rank]))
            np.testing.assert_array_equal(each.y, each.recomputed)
        _check_adjoint(passes, accumulate=number % 2 == 1)


def test_several_early_moves_travel_at_one_time() -> None:
    """Each has message buffers of its own: the second may be sent before the first is received."""
    shape, ranks = (2, 9, 3, 2), 3
    tiles = layout.tiles(shape, (ranks, 1))
    targets = [layout.needed(shape, [(box[0], rows, *box[2:]) for box in tiles.boxes]) for rows in ((0, 4), (2, 9), (8, 9))]
    x = np.random.default_rng(0).standard_normal(shape)

    def program(comm: ThreadCommunicator) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        group = SplitGroup(comm, virtual_engine(comm))
        mine = x[relative(tiles.boxes[comm.rank], whole(shape))].copy()
        specs = [RedistributeSpec(tiles, target, comm.rank, "halo", group, early=True) for target in targets]
        operators = [_bound(spec, mine, number, False) for number, spec in enumerate(specs)]
        for operator in operators:
            operator.begin_forward()
        for operator in reversed(operators):
            operator.forward(StepContext())
        for operator in operators:
            operator.begin_backward()
        for operator in reversed(operators):
            operator.backward_input()
        return [(each.buffers.output, each.buffers.output_grad, each.buffers.input_grads[0]) for each in operators]

    for seed in (None, 1, 2, 3):
        results = run_virtual(ranks, program, seed=seed)
        for number, target in enumerate(targets):
            expected = np.zeros(shape)
            for rank, box in enumerate(target.boxes):
                y, dy, _ = results[rank][number]
                np.testing.assert_array_equal(y, cut(x, box))
                expected[relative(box, whole(shape))] += dy
            for rank, box in enumerate(tiles.boxes):
                np.testing.assert_allclose(results[rank][number][2], expected[relative(box, whole(shape))], rtol=1e-13)


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


@pytest.mark.parametrize("ranks", RANKS)
def test_a_move_and_its_sum_are_each_others_adjoint(ranks: int) -> None:
    """A sum does forward what a gather to everybody does backward."""
    target = layout.samples((5, 2, 1, 3), [5 - ranks // 2, *(0,) * (ranks - 2), ranks // 2])
    everything = layout.everything(target.shape, ranks)

    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray]:
        group = SplitGroup(comm, virtual_engine(comm))
        partial = np.random.default_rng(comm.rank).standard_normal(target.shape)
        summed = _bound(ReduceScatterSpec(target, everything, comm.rank, "sum", group), partial, 0, False)
        summed.forward(StepContext())
        gather = _bound(
            RedistributeSpec(target, everything, comm.rank, "gather", group),
            np.zeros(shape_of(target.boxes[comm.rank])),
            0,
            False,
        )
        gather.buffers.output_grad[...] = partial
        gather.backward_input()
        return summed.buffers.output, gather.buffers.input_grads[0]

    for summed, gathered in run_virtual(ranks, program):
        np.testing.assert_array_equal(summed, gathered)


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


def _words(target: Layout) -> list[int]:
    return [int(np.prod(shape_of(box))) for box in target.boxes]


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
        assert saved == 8 * (_words(halo)[rank] - _words(tiles)[rank])


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_moves_and_sums_on_devices_are_those_of_the_host(ranks: int, dtype: str, emulated_device: EmulatedDeviceFactory) -> None:
    moves = [*random_moves(200 + ranks, ranks, 25), *_tall(ranks)]

    def program(comm: ThreadCommunicator) -> None:
        others = comm.split(0, comm.rank, "host")
        assert others is not None
        device = emulated_device(10 * ranks + comm.rank)
        on_device = CudaKernelSet(CudaRuntime(device, device.stream("compute"), dtype))
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
