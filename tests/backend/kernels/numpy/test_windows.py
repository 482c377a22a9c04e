"""Windows over images: columns, planes and taps against the definition; buffers, blocks of rows and sums of columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.columns import Columns
from hpctrain.backend.kernels.numpy.memory import allocate, carve, total_bytes
from hpctrain.backend.kernels.numpy.reduce import column_sums
from hpctrain.backend.kernels.specs import Window

UP_TO_3 = st.integers(1, 3)


def gather(image: np.ndarray, window: Window, outputs: tuple[int, int], groups: int) -> np.ndarray:
    """(groups, N * Ho * Wo, R * S * C / groups) from the definition."""
    n, h, w, c = image.shape
    out = np.zeros((n, *outputs, *window.kernel, c))
    for o, p, r, s in np.ndindex(*outputs, *window.kernel):
        i = o * window.stride[0] - window.padding[0] + r * window.dilation[0]
        j = p * window.stride[1] - window.padding[2] + s * window.dilation[1]
        if 0 <= i < h and 0 <= j < w:
            out[:, o, p, r, s] = image[:, i, j]
    pixels, taps = n * outputs[0] * outputs[1], window.kernel[0] * window.kernel[1]
    out = out.reshape(pixels, taps, groups, c // groups)
    return out.transpose(2, 0, 1, 3).reshape(groups, pixels, taps * c // groups)


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(1, 8)), st.sampled_from([1, 2, 17]), UP_TO_3,
    st.tuples(UP_TO_3, UP_TO_3), st.tuples(UP_TO_3, UP_TO_3), st.tuples(UP_TO_3, UP_TO_3),
    st.tuples(st.integers(-2, 4), st.integers(-2, 4)), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 4000),
)  # fmt: skip
def test_columns_are_the_windows(size, channels, groups, kernel, stride, dilation, padding, outputs, column_bytes) -> None:
    window = Window(kernel, stride, (padding[0], 0, padding[1], 0), dilation)
    image = np.random.default_rng(0).standard_normal((*size, groups * channels))
    columns = Columns(image.shape, "float64", window, outputs, groups=groups, column_bytes=column_bytes)
    scratch = np.full(total_bytes(columns.scratch), 0xFF, np.uint8)
    chunks = columns.bind(image, *carve(scratch, columns.scratch))
    expected = gather(image, window, outputs, groups)
    covered = 0
    assert len(chunks) == columns.count
    for chunk in chunks:
        scratch.fill(0xFF)
        chunk.fill()
        assert chunk.start == covered
        assert chunk.matrix.shape[1] == chunk.stop - chunk.start <= columns.largest
        np.testing.assert_array_equal(chunk.matrix, expected[:, chunk.pixels])
        covered = chunk.stop
    assert covered == columns.pixels == expected.shape[1]


@pytest.mark.parametrize("groups", [1, 3])
def test_a_plain_1x1_convolution_copies_nothing(groups: int) -> None:
    image = np.random.default_rng(0).standard_normal((2, 5, 7, 6))
    columns = Columns(image.shape, "float64", Window((1, 1), (1, 1), (0, 0, 0, 0)), (5, 7), groups=groups)
    assert total_bytes(columns.scratch) == 0
    (chunk,) = columns.bind(image, np.empty(0), np.empty(0))
    assert np.shares_memory(chunk.matrix, image)
    np.testing.assert_array_equal(chunk.matrix, image.reshape(70, groups, -1).transpose(1, 0, 2))


@pytest.mark.parametrize("size", [0, 1, 4097, 5 << 20])
def test_buffers_are_zeroed_aligned_and_writable(size: int) -> None:
    buffer = allocate(size)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (size,)
    assert not buffer.any()
    assert size == 0 or buffer.ctypes.data % 64 == 0
    buffer[...] = 1


def test_carved_arrays_are_aligned_and_apart() -> None:
    requests = [((3, 5), "float32"), ((7,), "bool"), ((0, 4), "float64"), ((2, 9), "float64"), ((1,), "uint8")]
    buffer = allocate(total_bytes(requests))
    arrays = carve(buffer, requests)
    for i, (array, (shape, dtype)) in enumerate(zip(arrays, requests, strict=True)):
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0 or array.size == 0
        array[...] = i % 2
    for i, array in enumerate(arrays):
        assert (array == i % 2).all()


def test_nothing_is_carved_from_no_buffer() -> None:
    (array,) = carve(None, [((0, 3), "float32")])
    assert array.shape == (0, 3)


def test_float32_does_not_lose_small_terms() -> None:
    """A running float32 sum of 2**25 ones stops at 2**24."""
    out = np.empty(1, np.float32)
    column_sums(np.broadcast_to(np.float32(1), (1 << 25, 1)), out)
    assert out[0] == 1 << 25
