"""Planes: taps read what the window reads, and adding back is the adjoint of loading."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.memory import carve
from hpctrain.backend.kernels.numpy.planes import PlaneBlock, Planes
from hpctrain.backend.kernels.numpy.taps import OutputBlock, blocks
from hpctrain.backend.kernels.specs import Window

SMALL = st.integers(1, 4)


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
