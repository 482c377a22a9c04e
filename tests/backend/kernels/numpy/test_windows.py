"""Windows over images: columns, planes and taps against the definition; buffers, blocks of rows and sums of columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.columns import Columns
from hpctrain.backend.kernels.numpy.memory import allocate, carve, total_bytes
from hpctrain.backend.kernels.numpy.planes import PlaneBlock, Planes
from hpctrain.backend.kernels.numpy.reduce import column_sums
from hpctrain.backend.kernels.numpy.rows import RowBlocks
from hpctrain.backend.kernels.numpy.taps import OutputBlock, blocks, span, split, tap_range, taps
from hpctrain.backend.kernels.specs import Window

SMALL, UP_TO_9 = st.integers(1, 4), st.integers(0, 9)


@given(st.integers(0, 3), st.integers(1, 9), UP_TO_9, SMALL, st.integers(-2, 4), SMALL, UP_TO_9, UP_TO_9)
def test_reach(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int, low: int, high: int) -> None:
    found = tap_range(tap, size, outputs, stride, padding, dilation)
    expected = {o: o * stride - padding + tap * dilation for o in range(outputs)}
    expected = {o: i for o, i in expected.items() if 0 <= i < size}
    pairs = dict(zip(range(found.first, found.stop), range(size)[found.inputs], strict=True))
    assert pairs == expected
    assert found.empty == (not expected)
    part = found.within(low, max(low, min(high, outputs)))
    inside = {o - low: i for o, i in expected.items() if low <= o < high}
    assert dict(zip(range(part.first, part.stop), range(size)[part.inputs], strict=True)) == inside


@given(st.integers(-5, 12), st.integers(1, 9), st.integers(1, 9))
def test_span(first: int, size: int, image: int) -> None:
    found = span(first, size, image)
    inside = [i for i in range(first, first + size) if 0 <= i < image]
    assert list(range(image))[found.start : found.stop] == inside
    assert list(range(first, first + size))[found.before : found.after] == inside
    assert found.padded == (len(inside) < size)


@given(st.integers(0, 40), st.integers(0, 12))
def test_split(size: int, limit: int) -> None:
    parts = list(split(size, limit))
    assert [i for low, high in parts for i in range(low, high)] == list(range(size))
    lengths = [high - low for low, high in parts]
    assert all(0 < length <= max(1, limit) for length in lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1


@given(st.integers(0, 5), st.integers(0, 6), st.integers(0, 6), st.integers(0, 50))
def test_blocks_cover_all_pixels_in_order(images: int, ho: int, wo: int, limit: int) -> None:
    pixels = []
    for block in blocks(images, (ho, wo), limit):
        part = [(n, o, p) for n in range(block.n0, block.n1) for o in range(block.o0, block.o1) for p in range(wo)]
        assert len(part) <= max(limit, wo)
        assert block.n1 - block.n0 == 1 or (block.o0, block.o1) == (0, ho)
        pixels += part
    assert pixels == [(n, o, p) for n in range(images) for o in range(ho) for p in range(wo)]


def test_taps_that_never_meet_the_image_are_left_out() -> None:
    window = Window((3, 1), (1, 1), (4, 0, 0, 0), (2, 1))
    assert [tap.number for tap in taps(window, (2, 3), (2, 3))] == [2]


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


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Window, tuple[int, int], list[OutputBlock], list[PlaneBlock]]:
    pairs = st.tuples(SMALL, SMALL)
    window = Window(draw(pairs), draw(pairs), draw(st.tuples(*[st.integers(0, 2)] * 4)), draw(pairs))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 3)))
    outputs = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    parts = list(blocks(shape[0], outputs, draw(st.integers(1, 60))))
    image = np.random.default_rng(0).standard_normal(shape)
    planes = Planes(shape, "float64", window, outputs, parts)
    buffer = np.full(int(np.prod(planes.scratch[0])) * 8 + 64, 0xFF, np.uint8)
    return image, window, outputs, parts, planes.bind(image, *carve(buffer, [planes.scratch]))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_taps_read_what_the_window_reads(case) -> None:
    image, window, outputs, parts, bound = case
    for block, planes in zip(parts, bound, strict=True):
        planes.load(-7.0)
        expected = np.full((len(planes.taps), block.n1 - block.n0, block.o1 - block.o0, outputs[1], image.shape[3]), -7.0)
        for t, o, p in np.ndindex(len(planes.taps), block.o1 - block.o0, outputs[1]):
            r, s = divmod(t, window.kernel[1])
            i = (o + block.o0) * window.stride[0] - window.padding[0] + r * window.dilation[0]
            j = p * window.stride[1] - window.padding[2] + s * window.dilation[1]
            if 0 <= i < image.shape[1] and 0 <= j < image.shape[2]:
                expected[t, :, o, p] = image[block.images, i, j]
        np.testing.assert_array_equal(np.stack(planes.taps), expected)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_adding_to_the_image_is_the_adjoint_of_loading(case) -> None:
    image, _, _, _, bound = case
    random, start = np.random.default_rng(1), image.copy()
    for planes in bound:
        np.copyto(image, start)
        planes.load(0.0)
        loaded = planes.all.copy()
        cotangent = random.standard_normal(planes.all.shape)
        image.fill(0)
        np.copyto(planes.all, cotangent)
        planes.add_to_image()
        assert np.vdot(image, start) == pytest.approx(np.vdot(cotangent, loaded))


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


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(1, 40), st.sampled_from([64, 1000, 1 << 16]))
def test_blocks_cover_the_tensor_and_channels_stay_in_place(rows: int, channels: int, elements: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, channels))
    blocks = RowBlocks(x.shape, elements=elements)
    views = blocks.views(x)
    np.testing.assert_array_equal(np.concatenate([view.reshape(-1) for view in views] or [x.reshape(-1)]), x.reshape(-1))
    assert all(np.shares_memory(view, x) and view.size <= blocks.largest for view in views)
    tiled, sums = blocks.tile(np.arange(channels), "float64"), blocks.sums()
    for view in views:
        np.testing.assert_array_equal(
            np.broadcast_to(tiled[: view.shape[1]], view.shape).reshape(-1, channels)[-1], np.arange(channels)
        )
        sums[: view.shape[1]] += view.sum(axis=0)
    np.testing.assert_allclose(blocks.fold(sums), x.sum(axis=0), atol=1e-10)


def test_float32_does_not_lose_small_terms() -> None:
    """A running float32 sum of 2**25 ones stops at 2**24."""
    out = np.empty(1, np.float32)
    column_sums(np.broadcast_to(np.float32(1), (1 << 25, 1)), out)
    assert out[0] == 1 << 25
