"""Sums over pixels, and values spread over them, are those of NumPy in every dtype, and the same bits in every order."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.kernels.cuda.pixel_sums import spread_pixels, sum_pixels
from tests.support.emulated import CudaKernelsFactory

#: images (N, H, W, C): whole packs and not, one pixel, and none of samples, pixels, channels; more packs than threads at once
SHAPES = [(3, 4, 5, 8), (2, 7, 9, 3), (1, 1, 1, 16), (3, 0, 5, 8), (0, 4, 5, 8), (2, 3, 4, 0), (5, 2, 3, 225), (40, 2, 1, 400)]
#: of one rounding, and of the terms' own where sums are float32
TOLERANCES = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2**-8}


def _values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape)
    return bfloat16_values(bfloat16_bits(values)).astype(np.float64) if dtype == "bfloat16" else values.astype(dtype)


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
        sum_pixels(kernels.runtime, mean, image, 1 / 40)
        summed = arithmetic.to_host(mean).copy()
        arithmetic.from_host(mean, means)
        spread_pixels(kernels.runtime, image, mean, 1 / 40)
        found.append((summed, arithmetic.to_host(image).copy()))
    for pair in found:
        for ours, first_ones in zip(pair, found[0], strict=True):
            np.testing.assert_array_equal(ours, first_ones)
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(found[0][0], sums, rtol=tolerance, atol=10 * tolerance)
    np.testing.assert_allclose(found[0][1], np.broadcast_to(means / 40, shape), rtol=tolerance)


def test_values_that_do_not_fit_the_images_are_refused(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    images, means = (kernels.arithmetic.zeros(24, "float32").reshape(shape) for shape in ((2, 3, 2, 2), (24, 1, 1, 1)))
    with pytest.raises(AssertionError, match="has not one pixel for each of"):
        sum_pixels(kernels.runtime, means, images, 1.0)
    halves = kernels.arithmetic.zeros(4, "bfloat16").reshape(2, 1, 1, 2)
    with pytest.raises(AssertionError, match="has not the dtype of"):
        spread_pixels(kernels.runtime, images, halves, 1.0)
