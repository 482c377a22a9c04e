"""im2col: the matrix holds the windows, whatever the chunks, the padding and the order of copying."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.columns import Columns
from hpctrain.backend.kernels.numpy.memory import carve, total_bytes
from hpctrain.backend.kernels.specs import Window

SMALL = st.integers(1, 3)


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
    st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(1, 8)), st.sampled_from([1, 2, 17]), SMALL,
    st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL),
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
