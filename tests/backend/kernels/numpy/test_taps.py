"""Index arithmetic of windows, against the definition."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.taps import blocks, span, split, tap_range, taps
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
