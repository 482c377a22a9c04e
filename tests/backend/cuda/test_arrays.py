"""Device arrays, their slices and rounding, shapes of launches, and products by a cuBLAS on memory of the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import DeviceArray, Precision, bfloat16_bits, bfloat16_values, grid_for, pack_width
from hpctrain.backend.cuda.libraries import WORKSPACE_BYTES, MatrixProducts
from hpctrain.backend.specs import item_bytes
from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import read, write
from tests.support.fake_cupy import FakeCublas


def _array(*shape: int, dtype: str = "float32") -> DeviceArray:
    return DeviceArray(1 << 12, shape, dtype, object())


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    start=st.none() | st.integers(-6, 6),
    stop=st.none() | st.integers(-6, 6),
)
def test_slices_are_where_those_of_an_ndarray_are(shape: tuple[int, ...], start: int | None, stop: int | None) -> None:
    reference = np.zeros(shape, np.float32)
    array = DeviceArray(reference.ctypes.data, shape, "float32", reference)
    got, wanted = array[start:stop], reference[start:stop]
    assert got.shape == wanted.shape
    assert not wanted.size or got.pointer == wanted.ctypes.data
    assert got.owner is reference


@pytest.mark.parametrize("index", [0, slice(None, None, 2), slice(None, None, -1), (0, 0), ..., None])
def test_other_indices_are_refused(index: Any) -> None:
    with pytest.raises(TypeError, match="in the device's memory"):
        _array(4, 2)[index]


def test_reshape() -> None:
    array = _array(4, 6)
    assert array.reshape(24).shape == array.reshape((24,)).shape == array.reshape([24]).shape == (24,)
    assert array.reshape(2, -1, 3).shape == (2, 4, 3)
    assert array.reshape(2, 12).pointer == array.pointer
    assert array.reshape(2, 12).owner is array.owner
    with pytest.raises(ValueError, match=r"Cannot reshape \(4, 6\) to \(5, 5\); the number of elements must stay 24"):
        array.reshape(5, 5)
    for shape in ((5, -1), (-1, -1), (-1, -24)):
        with pytest.raises(ValueError, match="Cannot reshape"):
            array.reshape(shape)
    assert _array(0, 3).reshape(-1, 3).shape == (0, 3)


def test_view() -> None:
    assert _array(5, 4, dtype="uint8").view("float32").shape == (5,)
    assert _array(3).view("bfloat16").shape == (6,)
    with pytest.raises(ValueError, match="Cannot view 3 bytes as float32; they must be a multiple of 4 bytes"):
        _array(3, dtype="uint8").view("float32")


def _write(array: DeviceArray) -> None:
    array[:] = 0  # type: ignore[index]


@pytest.mark.parametrize(
    "read",
    [
        *(np.asarray, np.array, np.add.reduce, float, int, bool, list, iter, _write),
        lambda array: np.add(array, 1),
        lambda array: array + np.float32(1),
        lambda array: np.float32(1) + array,
        lambda array: 3 in array,
        lambda array: np.copyto(np.zeros(3), array),
    ],
)
def test_elements_are_not_for_the_host(read: Callable[[DeviceArray], object]) -> None:
    with pytest.raises(TypeError):
        read(_array(3))


@given(items=st.integers(0, 1 << 40), block=st.sampled_from([32, 256, 1024]), multiprocessors=st.integers(1, 200))
def test_a_grid_has_a_thread_for_each_item_or_fills_the_device(items: int, block: int, multiprocessors: int) -> None:
    (blocks,) = grid_for(items, block, multiprocessors, waves=8)
    if blocks < 8 * multiprocessors:
        assert 0 <= blocks * block - items < block
    else:
        assert blocks == 8 * multiprocessors
        assert items > (blocks - 1) * block


@pytest.mark.parametrize(
    ("dtype_bytes", "channels", "pointers", "width"),
    [
        (4, 64, (0, 256), 4),
        (2, 64, (0,), 8),
        (8, 2, (), 2),
        (4, 63, (), 1),
        (2, 4, (), 1),
        (4, 64, (256, 8), 1),
        (4, 64, (None, 256), 4),
        (4, 0, (), 4),
    ],
)
def test_the_width_of_a_pack(dtype_bytes: int, channels: int, pointers: tuple[int | None, ...], width: int) -> None:
    arrays = [None if pointer is None else DeviceArray(pointer, (channels,), "uint8", None) for pointer in pointers]
    assert pack_width(dtype_bytes, channels, arrays) == width


ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_comes_back() -> None:
    values = bfloat16_values(ALL_BITS)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(bfloat16_bits(values)[numbers], ALL_BITS[numbers])
    assert np.isnan(bfloat16_values(bfloat16_bits(values[~numbers]))).all()


def test_values_are_rounded_to_the_nearest_and_to_even_in_the_middle() -> None:
    """Of each pair of neighbours: the middle, and the float32 just below and above it."""
    low = ALL_BITS[(ALL_BITS & 0x7FFF) < 0x7F7F]  # so that the neighbour away from zero is finite
    middle = (low.astype(np.uint32) << 16) + np.uint32(0x8000)
    even = low + (low & 1)
    np.testing.assert_array_equal(bfloat16_bits(middle.view(np.float32)), even)
    np.testing.assert_array_equal(bfloat16_bits((middle - np.uint32(1)).view(np.float32)), low)
    np.testing.assert_array_equal(bfloat16_bits((middle + np.uint32(1)).view(np.float32)), low + 1)


def test_values_beyond_the_largest_become_infinite() -> None:
    largest = bfloat16_values(np.array([0x7F7F], np.uint16))
    assert np.isinf(bfloat16_values(bfloat16_bits(np.full(1, np.finfo(np.float32).max)))).all()
    assert bfloat16_values(bfloat16_bits(largest * np.float32(1 + 2**-9))) == largest


def test_float64_is_rounded_by_way_of_float32() -> None:
    value = np.array([1 + 2**-8 + 2**-40])  # the middle of two neighbours, as soon as it is float32
    assert bfloat16_values(bfloat16_bits(value)) == 1.0


STREAM = 4096


class Bench:
    """Matrices of small whole numbers, whose products every dtype holds."""

    def __init__(self) -> None:
        self.cublas, self.device = FakeCublas(), EmulatedDevice()
        self.workspace = self.device.allocate(256)
        self.products = MatrixProducts(self.cublas, STREAM, self.workspace)
        self.random = np.random.default_rng(3)

    def place(self, values: np.ndarray, dtype: str):
        array = self.device.allocate(values.size * item_bytes(dtype)).view(dtype).reshape(values.shape)
        write(array, values)
        return array

    def whole(self, *shape: int) -> np.ndarray:
        return self.random.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize(("transpose_a", "transpose_b", "accumulate"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize(
    ("dtype", "c_dtype", "precision", "compute_type"),
    [
        ("float32", "float32", "float32", 69),
        ("float32", "float32", "tf32", 77),
        ("bfloat16", "bfloat16", "bfloat16", 68),
        ("bfloat16", "float32", "bfloat16", 68),
    ],
)
@pytest.mark.parametrize("shape", [(4, 3, 5), (1, 7, 2), (6, 1, 1)])
def test_products(
    shape: tuple[int, int, int],
    dtype: str,
    c_dtype: str,
    precision: Precision,
    compute_type: int,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
) -> None:
    bench, (m, k, n) = Bench(), shape
    a, b, c = bench.whole(m, k), bench.whole(k, n), bench.whole(m, n)
    left, right = bench.place(a.T if transpose_a else a, dtype), bench.place(b.T if transpose_b else b, dtype)
    out = bench.place(c, c_dtype)
    bench.products.run(
        left, right, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate, precision=precision
    )
    np.testing.assert_array_equal(read(out), a @ b + accumulate * c)
    assert bench.cublas.compute_type == compute_type


def test_the_workspace_is_set_after_the_stream_and_stays() -> None:
    """Setting the stream takes it away."""
    bench = Bench()
    a = bench.place(bench.whole(2, 2), "float32")
    for _ in range(2):
        bench.products.run(a, a, a, transpose_a=False, transpose_b=False, accumulate=False, precision="float32")
    assert bench.cublas.calls == ["create", "setStream", "setWorkspace", "setMathMode", "gemmEx", "gemmEx"]
    assert bench.cublas.stream == STREAM
    assert bench.cublas.workspace == (bench.workspace.pointer, 256)
    assert bench.cublas.mode == 16
    assert WORKSPACE_BYTES % 256 == 0


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 2)])
def test_nothing_is_asked_of_cublas_without_elements(shape: tuple[int, int, int]) -> None:
    bench, (m, k, n) = Bench(), shape
    a, b, c = (bench.place(bench.whole(*two), "float32") for two in ((m, k), (k, n), (m, n)))
    before = read(c).copy()
    bench.products.run(a, b, c, transpose_a=False, transpose_b=False, accumulate=True, precision="float32")
    np.testing.assert_array_equal(read(c), before)
    assert "gemmEx" not in bench.cublas.calls


@pytest.mark.parametrize("shape", [(1 << 31, 1, 1), (1, 1 << 31, 1), (1, 1, (1 << 32) + 1)])
def test_more_rows_than_cublas_counts_are_refused(shape: tuple[int, int, int]) -> None:
    """32 bits would turn the last size into 1, and cuBLAS would multiply a part."""
    bench, (m, k, n) = Bench(), shape
    options = {"transpose_a": False, "transpose_b": False, "accumulate": False}
    with pytest.raises(BackendError, match=r"at most 2147483647 rows and columns, not \d+ x \d+ by .*; train with smaller micro"):
        bench.products.run(_array(m, k), _array(k, n), _array(m, n), **options, precision="float32")
    assert "gemmEx" not in bench.cublas.calls


def test_what_does_not_fit_is_refused() -> None:
    bench = Bench()
    a, b, c = (bench.place(bench.whole(*two), "float32") for two in ((2, 3), (2, 3), (2, 2)))
    bench.products.run(a, b, c, transpose_a=False, transpose_b=True, accumulate=False, precision="float32")
    with pytest.raises(ValueError, match="does not have the shape of"):
        bench.products.run(a, b, c, transpose_a=False, transpose_b=False, accumulate=False, precision="float32")
    with pytest.raises(BackendError, match="support bfloat16, float32, tf32, not float64; set precision"):
        bench.products.run(a, b, c, transpose_a=False, transpose_b=True, accumulate=False, precision="float64")


@pytest.mark.parametrize("function", ["create", "setStream", "setWorkspace", "setMathMode", "gemmEx"])
def test_every_failure_is_reported(function: str) -> None:
    bench = Bench()
    bench.cublas.failing = function
    a = bench.place(bench.whole(2, 2), "float32")
    with pytest.raises(BackendError, match=rf"cublas{function[0].upper()}{function[1:]} failed with status 13"):
        MatrixProducts(bench.cublas, STREAM, bench.workspace).run(
            a, a, a, transpose_a=False, transpose_b=False, accumulate=False, precision="float32"
        )
