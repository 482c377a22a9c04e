"""Adaptive average pooling: definition, central differences, images without pixels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.adaptive_pool import averaging_matrix
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import AdaptiveAveragePoolSpec
from hpctrain.testing.operator_gradients import assert_close, check_gradient
from hpctrain.testing.operators import OperatorBench

KERNELS = NumpyKernelSet()
SIZES = st.integers(1, 9)


def direct(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    y = np.empty((x.shape[0], *size, x.shape[3]))
    for i, j in np.ndindex(*size):
        rows, columns = (
            slice(k * length // outputs, -(-(k + 1) * length // outputs))
            for k, length, outputs in zip((i, j), x.shape[1:3], size, strict=True)
        )
        y[:, i, j] = x[:, rows, columns].mean(axis=(1, 2))
    return y


@settings(max_examples=80, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 3))
def test_equals_the_definition(h: int, w: int, ho: int, wo: int, n: int) -> None:
    x = np.random.default_rng(0).standard_normal((n, h, w, 3))
    y = OperatorBench(KERNELS, AdaptiveAveragePoolSpec((ho, wo)), [x]).forward()
    assert_close(y, direct(x, (ho, wo)), 1e-12, "output")


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30))
def test_every_window_averages(outputs: int, size: int) -> None:
    matrix = averaging_matrix(outputs, size, "float64")
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0)
    assert (matrix.sum(axis=0) > 0).all()


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (9, 7)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradient(size: tuple[int, int], accumulate: bool) -> None:
    x = np.random.default_rng(0).standard_normal((2, 7, 9, 3))
    check_gradient(KERNELS, AdaptiveAveragePoolSpec(size), [x], accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_blocks_of_images_make_one_pooling(accumulate: bool) -> None:
    x = np.random.default_rng(0).standard_normal((7, 41, 43, 65))
    spec = AdaptiveAveragePoolSpec((3, 2))
    bench = OperatorBench(KERNELS, spec, [x], accumulate=accumulate)
    assert bench.operator.images < 7
    y = bench.forward()
    assert_close(y, direct(x, (3, 2)), 1e-12, "output")
    dy, start = np.random.default_rng(1).standard_normal(y.shape), np.ones(x.shape)
    dx = bench.backward(dy, [start]).inputs[0] - (start if accumulate else 0)
    assert np.vdot(x, dx) == pytest.approx(np.vdot(y, dy))


@pytest.mark.parametrize("shape", [(0, 7, 9, 3), (2, 0, 9, 3), (2, 7, 0, 3)])
def test_an_image_without_pixels_averages_to_zero(shape: tuple[int, ...]) -> None:
    bench = OperatorBench(KERNELS, AdaptiveAveragePoolSpec((2, 3)), [np.zeros(shape)])
    y = bench.forward()
    assert y.shape == (shape[0], 2, 3, 3)
    assert not y.any()
    assert bench.backward(np.ones(y.shape)).inputs[0].shape == shape
