"""Fetches give the elements as they were at their place in the work, two of them at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.cuda.fetch import FetchBuffers
from tests.support.emulated import CudaKernelsFactory


@pytest.mark.parametrize("seed", range(6))
def test_a_fetch_gives_what_was_there(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
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


def test_bfloat16_arrives_as_float32(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    array = kernels.arithmetic.zeros(5, "bfloat16")
    kernels.arithmetic.fill(array, 1.5)
    values = FetchBuffers(kernels.runtime, array.nbytes).fetch(array).result()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.full(5, 1.5))
