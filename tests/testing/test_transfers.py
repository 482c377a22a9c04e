"""Copies to a kernel set's memory and back, and bytes that nobody may read."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.testing.transfers import empty, poison, put, take
from tests.support.emulated import CudaKernelsFactory


def check(kernels: KernelSet, dtype: str, rounding: float) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5, 7))
    array = empty(kernels, (3, 5, 7), dtype)
    assert np.isnan(take(kernels, array)).all()
    put(kernels, array, values)
    copy = take(kernels, array)
    np.testing.assert_allclose(copy, values, rtol=rounding)
    poison(kernels, array)
    assert np.isnan(take(kernels, array)).all()
    assert np.isfinite(copy).all()


def test_arrays_of_the_host() -> None:
    check(NumpyKernelSet(), "float32", 1e-7)


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 0.0), ("float32", 1e-7), ("bfloat16", 2.0**-8)])
def test_arrays_of_a_device(cuda_kernels: CudaKernelsFactory, dtype: str, rounding: float) -> None:
    check(cuda_kernels(dtype), dtype, rounding)


def test_no_elements(cuda_kernels: CudaKernelsFactory) -> None:
    for kernels in (NumpyKernelSet(), cuda_kernels()):
        array = empty(kernels, (0, 7), "float64")
        put(kernels, array, np.zeros((0, 7)))
        assert take(kernels, array).shape == (0, 7)
