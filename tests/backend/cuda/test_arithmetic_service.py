"""The arithmetic service of the cuda set: sums, checksums, boxes, copies and fetches are NumPy's in any order of threads."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.arithmetic import (
    TILE,
    ArrayTable,
    CudaArithmetic,
)
from hpctrain.backend.cuda.device import DeviceArray, bfloat16_bits
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.operator import ColumnSums, carve, total_bytes
from hpctrain.backend.cuda.runtime import CudaRuntime, FetchBuffers, Staging
from hpctrain.backend.specs import item_bytes, parameter_dtype
from hpctrain.core.intervals import Box
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import on_host, read, write
from tests.support.emulated import CudaKernelsFactory
from tests.support.rounded import DTYPES, rounded

#: (elements, first one in its memory): whole packs, a rest, less than a pack, none; at places where packs may begin and not
PLACES = [(64, 0), (67, 0), (3, 0), (0, 0), (64, 1), (67, 4), (300, 2)]


def _values(size: int | tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Random numbers that `dtype` holds exactly."""
    return rounded(np.random.default_rng(seed).standard_normal(size) * 100, dtype)


@pytest.mark.parametrize(("size", "first"), PLACES)
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_copies_round(cuda_kernels: CudaKernelsFactory, target_dtype: str, source_dtype: str, size: int, first: int) -> None:
    for seed in range(3):
        arithmetic = cuda_kernels(seed=seed).arithmetic
        values = _values(size, source_dtype)
        source, whole = arithmetic.zeros(size + first, source_dtype)[first:], arithmetic.zeros(size + first + 9, target_dtype)
        arithmetic.from_host(source, values)
        arithmetic.copy(whole[first : first + size], source)
        arrived = arithmetic.to_host(whole)
        np.testing.assert_array_equal(arrived[first : first + size], rounded(values, target_dtype))
        assert not arrived[:first].any()
        assert not arrived[first + size :].any()


@pytest.mark.parametrize(("size", "first"), PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_subtract_and_fill(cuda_kernels: CudaKernelsFactory, dtype: str, size: int, first: int) -> None:
    a, b = _values(size, dtype, 1), _values(size, dtype, 2)
    for seed in range(3):
        arithmetic = cuda_kernels(seed=seed).arithmetic
        whole, source = arithmetic.zeros(size + first + 9, dtype), arithmetic.zeros(size + first, dtype)[first:]
        target = whole[first : first + size]
        arithmetic.from_host(target, a)
        arithmetic.from_host(source, b)
        arithmetic.add(target, source)
        np.testing.assert_array_equal(arithmetic.to_host(target), rounded(a + b, dtype))
        arithmetic.subtract(target, source)
        np.testing.assert_array_equal(arithmetic.to_host(target), rounded(rounded(a + b, dtype) - b, dtype))
        arithmetic.fill(target, 0.3)
        expected = np.zeros(whole.size)
        expected[first : first + size] = rounded(np.array(0.3), dtype)
        np.testing.assert_array_equal(arithmetic.to_host(whole), expected)


def _half_bits(kernels: CudaKernelSet, source: np.ndarray) -> np.ndarray:
    """The bits of float32 values that a kernel has rounded to bfloat16."""
    arithmetic = kernels.arithmetic
    single, half = arithmetic.zeros(source.size, "float32"), arithmetic.zeros(source.size, "bfloat16")
    arithmetic.from_host(single, source)
    arithmetic.copy(half, single)
    return arithmetic.to_host(half.view("uint16"))


def test_every_bfloat16_survives_the_way_to_float32_and_back(cuda_kernels: CudaKernelsFactory) -> None:
    kernels, bits = cuda_kernels(), np.arange(1 << 16, dtype=np.uint16)
    arithmetic = kernels.arithmetic
    half, single = arithmetic.zeros(bits.size, "bfloat16"), arithmetic.zeros(bits.size, "float32")
    arithmetic.from_host(half.view("uint16"), bits)
    arithmetic.copy(single, half)
    np.testing.assert_array_equal(arithmetic.to_host(single).view(np.uint32), bits.astype(np.uint32) << 16)
    arithmetic.copy(half, single)
    not_a_number = (bits & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(arithmetic.to_host(half.view("uint16")), np.where(not_a_number, 0x7FFF, bits))


def test_every_float32_near_a_bfloat16_is_rounded_as_on_the_host(cuda_kernels: CudaKernelsFactory) -> None:
    """Between all neighbours: the tie, and one bit below and above it; subnormals, the largest numbers and NaN are among them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        source = (upper | np.uint32(lower)).view(np.float32)
        np.testing.assert_array_equal(_half_bits(cuda_kernels(), source), bfloat16_bits(source))


def test_arrays_may_be_dropped_before_it_is_known_whether_they_are_finite(cuda_kernels: CudaKernelsFactory) -> None:
    for seed in range(10):
        kernels = cuda_kernels("float32", seed)
        answers = []
        for value in (1.0, np.inf):
            array = kernels.arithmetic.zeros(8, "float32")
            kernels.arithmetic.fill(array, value)
            answers.append(kernels.arithmetic.fetch_finite([array]))
            del array
        assert [bool(answer.result()[0]) for answer in answers] == [True, False]
        kernels.runtime.device.finish()


def test_the_service_is_that_of_all_sets() -> None:
    for name, method in inspect.getmembers(Arithmetic, inspect.isfunction):
        offered = getattr(CudaArithmetic, name)
        assert offered is not method, f"{name} goes by way of the host"
        assert inspect.signature(offered).parameters.keys() == inspect.signature(method).parameters.keys()


SIZES = (0, 5, TILE + 3, 0, 7, 2 * TILE, 1, 0)


def _placed(kernels: CudaKernelSet, dtype: str, sizes: tuple[int, ...] = SIZES) -> tuple[list[np.ndarray], list[DeviceArray]]:
    """Contiguous arrays, so that most do not begin where packs may."""
    flat = kernels.arithmetic.zeros(sum(sizes), dtype)
    kernels.arithmetic.from_host(flat, np.random.default_rng(3).standard_normal(sum(sizes)))
    stops = np.cumsum(sizes)
    arrays = [flat[int(stop) - size : int(stop)] for size, stop in zip(sizes, stops, strict=True)]
    return [kernels.arithmetic.to_host(array) for array in arrays], arrays


def _table(kernels: CudaKernelSet, arrays: list[DeviceArray]) -> ArrayTable:
    return ArrayTable(kernels.runtime, arrays, Staging(kernels.runtime, 4096, count=1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_square_sums_are_float64_and_the_same_in_all_orders(cuda_kernels: CudaKernelsFactory, dtype: str) -> None:
    bits = []
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        values, arrays = _placed(kernels, dtype)
        sums = _table(kernels, arrays).square_sums().result()
        assert sums.dtype == np.float64
        np.testing.assert_allclose(sums, [np.square(x, dtype=np.float64).sum() for x in values], rtol=1e-14)
        alone = [float(_table(kernels, [array]).square_sums().result()[0]) for array in arrays if array.size < TILE]
        assert alone == [float(total) for total, array in zip(sums, arrays, strict=True) if array.size < TILE]
        bits.append(sums.tobytes())
    assert len(set(bits)) == 1


def test_tables_are_read_again_for_each_sum(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    _, arrays = _placed(kernels, "float32")
    table = _table(kernels, arrays)
    first = table.square_sums().result().copy()
    kernels.arithmetic.fill(arrays[1], 3)
    second = table.square_sums().result()
    assert second[1] == 45
    np.testing.assert_array_equal(np.delete(second, 1), np.delete(first, 1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("seed", range(2))
def test_one_element_that_is_not_finite_shows_in_its_array_alone(
    cuda_kernels: CudaKernelsFactory, dtype: str, value: float, seed: int
) -> None:
    kernels = cuda_kernels(seed=seed)
    _, arrays = _placed(kernels, dtype)
    table = _table(kernels, arrays)
    for i, place in ((1, 4), (2, TILE + 1), (4, 0), (5, TILE - 1)):
        kernels.arithmetic.fill(arrays[i][place : place + 1], value)
        expected = [k != i for k in range(len(arrays))]
        np.testing.assert_array_equal(table.finite().result(), expected)
        kernels.arithmetic.fill(arrays[i], 3e38)
        assert table.finite().result().all()


def array(device: EmulatedDevice, shape: tuple[int, ...], dtype: str) -> DeviceArray:
    return device.allocate(int(np.prod(shape)) * item_bytes(dtype)).view(dtype).reshape(shape)


def sums(values: np.ndarray, dtype: str, seed: int, relu: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The sums over the rows of `values`, by kernels that find NaN in scratch and result; and what becomes of `values`."""
    device = EmulatedDevice(seed)
    x, out = array(device, values.shape, dtype), array(device, values.shape[1:], parameter_dtype(dtype))
    write(x, values)
    write(out, np.full(out.shape, np.nan))
    plan = ColumnSums(*values.shape, dtype, CudaRuntime(device, device.stream("compute"), dtype))
    scratch = device.allocate(total_bytes([plan.scratch]))
    on_host(scratch)[...] = 0xFF
    output = None
    if relu is not None:
        output = array(device, relu.shape, dtype)
        write(output, relu)
    plan.run(x, out, *carve(scratch, [plan.scratch]), relu=output)
    return read(out).copy(), read(x).copy()


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=25)
@given(
    rows=st.one_of(st.integers(0, 9), st.integers(500, 1500)),
    columns=st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 72, 257, 600])),
    dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
    relu=st.booleans(),
)
def test_equals_numpy_in_every_order(rows: int, columns: int, dtype: str, relu: bool) -> None:
    random = np.random.default_rng(rows)
    values, output = (random.integers(-8, 9, (rows, columns)) / 8 for _ in range(2))  # sums are exact in every dtype of sums
    expected = np.where(output > 0, values, 0.0) if relu else values
    for seed in (0, 1, 3):
        total, after = sums(values, dtype, seed, output if relu else None)
        np.testing.assert_array_equal(total, expected.sum(axis=0))
        np.testing.assert_array_equal(after, expected)


def test_rounded_sums_have_the_same_bits_in_every_order(emulated_device) -> None:
    values = np.random.default_rng(0).standard_normal((2000, 24))
    results = [sums(values, "float32", seed)[0] for seed in (0, 1, 4)]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize(("rows", "launches"), [(0, 1), (100, 1), (100_000, 2)])
def test_few_rows_need_one_launch(emulated_device, rows: int, launches: int) -> None:
    device = emulated_device()
    grids = []
    device.kernel = lambda source, name: lambda stream, grid, block, *arguments: grids.append(grid)
    plan = ColumnSums(rows, 64, "bfloat16", CudaRuntime(device, device.stream("compute"), "bfloat16"))
    nowhere = DeviceArray(0, (rows, 64), "bfloat16", None)
    plan.run(nowhere, DeviceArray(0, (64,), "float32", None), DeviceArray(0, *plan.scratch, None))
    assert len(grids) == launches
    assert grids[-1][1] == 1
    assert grids[0][1] == max(1, plan.scratch[0][0])


CHECKSUM_SIZES = (0, 5, TILE + 3, 0, 255, 256, 257, 2 * TILE, 1, 3 * TILE - 1, 0)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(3))
def test_sums_use_the_words_at_the_time_of_the_request(cuda_kernels: CudaKernelsFactory, dtype: str, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    values, arrays = _placed(kernels, dtype, CHECKSUM_SIZES)
    sums = kernels.arithmetic.word_sums(arrays)
    for _ in range(2):
        fetch = sums.fetch()
        kernels.arithmetic.fill(arrays[7], 3)
        assert fetch.result().tolist() == [int(array.view(np.uint32).sum(dtype=np.uint64)) % (1 << 32) for array in values]
        values[7] = np.full(CHECKSUM_SIZES[7], 3, dtype)


def _flip(kernels: CudaKernelSet, array: DeviceArray, word: int, bit: int) -> None:
    bits = kernels.arithmetic.to_host(array).copy()
    bits.view(np.uint32)[word] ^= np.uint32(1 << bit)
    kernels.arithmetic.from_host(array, bits)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(2))
def test_a_guard_marks_the_arrays_with_a_flipped_bit(cuda_kernels: CudaKernelsFactory, dtype: str, seed: int) -> None:
    kernels, random = cuda_kernels(seed=seed), np.random.default_rng(seed)
    _, arrays = _placed(kernels, dtype, CHECKSUM_SIZES)
    guard = kernels.arithmetic.word_sums(arrays)
    guard.remember()
    guard.compare()
    assert not guard.fetch_changed().result().any()
    marked = np.zeros(len(arrays), bool)
    for number in random.permutation([number for number, array in enumerate(arrays) if array.size]).tolist():
        _flip(kernels, arrays[number], int(random.integers(arrays[number].nbytes // 4)), int(random.integers(32)))
        guard.compare()
        marked[number] = True
        np.testing.assert_array_equal(guard.fetch_changed().result(), marked)
        guard.remember()
    kernels.wait()


def test_what_is_remembered_is_what_is_there_at_that_point(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    _, arrays = _placed(kernels, "float32", CHECKSUM_SIZES)
    guard = kernels.arithmetic.word_sums(arrays)
    kernels.arithmetic.fill(arrays[2], 1)
    guard.remember()
    guard.compare()
    kernels.arithmetic.fill(arrays[4], 1)  # after the comparison
    assert not guard.fetch_changed().result().any()
    guard.compare()
    np.testing.assert_array_equal(np.flatnonzero(guard.fetch_changed().result()), [4])


#: (target's shape and box, source's shape and box)
CASES: dict[str, tuple[tuple[int, ...], Box, tuple[int, ...], Box]] = {
    "rows of an image": ((2, 1, 5, 16), ((0, 2), (0, 1), (0, 5), (0, 16)), (2, 7, 5, 16), ((0, 2), (6, 7), (0, 5), (0, 16))),
    "a corner": ((3, 4, 5, 6), ((1, 3), (0, 2), (2, 5), (1, 4)), (2, 9, 9, 3), ((0, 2), (5, 7), (1, 4), (0, 3))),
    "packs at another place": ((2, 3, 2, 24), ((0, 2), (1, 3), (0, 2), (8, 16)), (2, 2, 4, 8), ((0, 2), (0, 2), (2, 4), (0, 8))),
    "an odd place": ((1, 2, 2, 16), ((0, 1), (0, 2), (0, 2), (1, 9)), (1, 2, 2, 8), ((0, 1), (0, 2), (0, 2), (0, 8))),
    "rows of an odd length": ((2, 2, 3, 17), ((0, 2), (0, 2), (0, 3), (0, 8)), (2, 2, 3, 8), ((0, 2), (0, 2), (0, 3), (0, 8))),
    "from rows of an odd length": (
        (2, 1, 3, 8),
        ((0, 2), (0, 1), (0, 3), (0, 8)),
        (2, 3, 3, 9),
        ((0, 2), (2, 3), (0, 3), (0, 8)),
    ),
    "more than all threads at once": (
        (2, 30, 50, 9),
        ((0, 2), (1, 30), (0, 49), (2, 9)),
        (2, 29, 49, 7),
        ((0, 2), (0, 29), (0, 49), (0, 7)),
    ),
    "two dims": ((5, 8), ((1, 4), (0, 8)), (3, 8), ((0, 3), (0, 8))),
    "one dim": ((50,), ((3, 40),), (37,), ((0, 37),)),
    "nothing": ((2, 3, 4, 5), ((0, 2), (1, 1), (0, 4), (0, 5)), (2, 3, 4, 5), ((0, 2), (3, 3), (0, 4), (0, 5))),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_boxes(cuda_kernels: CudaKernelsFactory, case: str, dtype: str, accumulate: bool) -> None:
    target_shape, target_box, source_shape, source_box = CASES[case]
    random = np.random.default_rng(0)
    old, new = (random.integers(-9, 9, shape).astype(np.float64) for shape in (target_shape, source_shape))
    inside, origin = (tuple(slice(*interval) for interval in box) for box in (target_box, source_box))
    expected = old.copy()
    expected[inside] = new[origin] + accumulate * old[inside]
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        target, source = (kernels.arithmetic.zeros(x.size, dtype).reshape(x.shape) for x in (old, new))
        kernels.arithmetic.from_host(target, old)
        kernels.arithmetic.from_host(source, new)
        kernels.arithmetic.copy_box(target, target_box, source, source_box, accumulate=accumulate)
        np.testing.assert_array_equal(kernels.arithmetic.to_host(target), expected)
        np.testing.assert_array_equal(kernels.arithmetic.to_host(source), new)


@pytest.mark.parametrize("seed", range(6))
def test_a_fetch_returns_what_was_there(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    array = kernels.arithmetic.zeros(6, "float32").reshape(2, 3)
    buffers = FetchBuffers(kernels.runtime, array.nbytes)
    for step in range(3):
        kernels.arithmetic.fill(array, step)
        first = buffers.fetch(array)
        kernels.arithmetic.fill(array, step + 0.5)
        second = buffers.fetch(array, np.negative)
        kernels.arithmetic.fill(array, -1)
        np.testing.assert_array_equal(first.result(), np.full((2, 3), step, np.float32))
        np.testing.assert_array_equal(second.result(), np.full((2, 3), -step - 0.5, np.float32))
        np.testing.assert_array_equal(first.result(), np.full((2, 3), step, np.float32))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "uint8"])
def test_arrays_larger_than_the_buffers_come_back(cuda_kernels: CudaKernelsFactory, dtype: str, seed: int) -> None:
    runtime = cuda_kernels(seed=seed).runtime
    staging = Staging(runtime, 40, count=2)
    values = np.random.default_rng(seed).integers(0, 255, (7, 9))
    source = values.astype(np.float32 if dtype == "bfloat16" else dtype)
    target = array(runtime.device, (7, 9), dtype)
    staging.upload(target, source)
    source[...] = 0
    staging.upload(array(runtime.device, (9,), dtype), source[0])
    arrived = staging.download(target)
    assert arrived.shape == (7, 9)
    assert arrived.dtype == source.dtype
    np.testing.assert_array_equal(arrived, values)


def test_numbers_are_not_cut_off_to_integers(cuda_kernels: CudaKernelsFactory) -> None:
    runtime = cuda_kernels().runtime
    with pytest.raises(TypeError, match="same_kind"):
        Staging(runtime, 64, count=1).upload(array(runtime.device, (4,), "int32"), np.full(4, 0.5))


def test_more_buffers_are_made_for_what_is_reserved_and_never_more_than_may_be(cuda_kernels: CudaKernelsFactory) -> None:
    runtime = cuda_kernels().runtime
    pinned, device = [], runtime.device
    make = device.pinned
    device.pinned = lambda size_bytes: pinned.append(size_bytes) or make(size_bytes)  # type: ignore[method-assign, func-returns-value]
    staging = Staging(runtime, 64, count=2, most=5)
    for size_bytes, count in ((0, 2), (129, 3), (64, 3), (64 * 1000, 5)):
        staging.reserve(size_bytes)
        assert pinned == [64] * count
    values, target = np.arange(200.0), array(runtime.device, (200,), "float64")
    staging.upload(target, values)
    np.testing.assert_array_equal(staging.download(target), values)


#: images (N, H, W, C): whole packs and not, one pixel, and none of samples, pixels, channels; more packs than threads at once
SHAPES = [(3, 4, 5, 8), (2, 7, 9, 3), (1, 1, 1, 16), (3, 0, 5, 8), (0, 4, 5, 8), (2, 3, 4, 0), (5, 2, 3, 225), (40, 2, 1, 400)]

#: of one rounding, and of the terms' own where sums are float32
TOLERANCES = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2**-8}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_what_is_spread(cuda_kernels: CudaKernelsFactory, shape: tuple[int, ...], dtype: str, first: int) -> None:
    """At places where packs may begin, and not."""
    images, means = _values(shape, dtype), _values((shape[0], 1, 1, shape[3]), dtype)
    sums = images.astype(np.float64).sum(axis=(1, 2), keepdims=True) / 40
    found = []
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        arithmetic = kernels.arithmetic
        image, mean = (arithmetic.zeros(x.size + first, dtype)[first:].reshape(x.shape) for x in (images, means))
        arithmetic.from_host(image, images)
        arithmetic.from_host(mean, np.full_like(means, 9.0))
        kernels.arithmetic.sum_pixels(mean, image, 1 / 40)
        summed = arithmetic.to_host(mean).copy()
        arithmetic.from_host(mean, means)
        kernels.arithmetic.spread_pixels(image, mean, 1 / 40)
        found.append((summed, arithmetic.to_host(image).copy()))
    for pair in found:
        for ours, first_ones in zip(pair, found[0], strict=True):
            np.testing.assert_array_equal(ours, first_ones)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(found[0][0], sums, rtol=tolerance, atol=1000 * tolerance)
    np.testing.assert_allclose(found[0][1], np.broadcast_to(means / 40, shape), rtol=tolerance)
