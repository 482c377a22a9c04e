"""Copies through pinned memory: whole arrays by pieces, rounded, and safe from what the host does next."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.cuda.staging import Staging, host_dtype
from tests.support.emulated import CudaKernelsFactory


def _array(runtime: CudaRuntime, size: int, dtype: str) -> DeviceArray:
    return runtime.device.allocate(size * item_bytes(dtype)).view(dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "uint8"])
def test_arrays_larger_than_the_buffers_come_back(cuda_kernels: CudaKernelsFactory, dtype: str, seed: int) -> None:
    runtime = cuda_kernels(seed=seed).runtime
    staging = Staging(runtime, 40, count=2)
    values = np.random.default_rng(seed).integers(0, 255, (7, 9))
    source = values.astype(np.float32 if dtype == "bfloat16" else dtype)
    target = _array(runtime, values.size, dtype).reshape(7, 9)
    staging.upload(target, source)
    source[...] = 0
    staging.upload(_array(runtime, 9, dtype), source[0])
    arrived = staging.download(target)
    assert arrived.shape == (7, 9)
    assert arrived.dtype == source.dtype
    np.testing.assert_array_equal(arrived, values)


def test_values_are_rounded_to_the_targets_dtype(cuda_kernels: CudaKernelsFactory) -> None:
    runtime = cuda_kernels().runtime
    staging = Staging(runtime, 64, count=3)
    source = np.random.default_rng(0).standard_normal(100)
    single, half = _array(runtime, 100, "float32"), _array(runtime, 100, "bfloat16")
    staging.upload(single, source)
    staging.upload(half, source)
    np.testing.assert_array_equal(staging.download(single), source.astype(np.float32))
    np.testing.assert_array_equal(staging.download(half), bfloat16_values(bfloat16_bits(source)))
    assert host_dtype(half) == np.uint16


def test_numbers_are_not_cut_off_to_integers(cuda_kernels: CudaKernelsFactory) -> None:
    runtime = cuda_kernels().runtime
    with pytest.raises(TypeError, match="same_kind"):
        Staging(runtime, 64, count=1).upload(_array(runtime, 4, "int32"), np.full(4, 0.5))


def test_without_elements(cuda_kernels: CudaKernelsFactory) -> None:
    runtime = cuda_kernels().runtime
    staging = Staging(runtime, 64, count=2)
    empty = _array(runtime, 0, "float32").reshape(0, 3)
    staging.upload(empty, np.zeros((0, 3)))
    assert staging.download(empty).shape == (0, 3)


def test_more_buffers_are_made_for_what_is_reserved_and_never_more_than_may_be(cuda_kernels: CudaKernelsFactory) -> None:
    runtime = cuda_kernels().runtime
    pinned, device = [], runtime.device
    make = device.pinned
    device.pinned = lambda size_bytes: pinned.append(size_bytes) or make(size_bytes)  # type: ignore[method-assign, func-returns-value]
    staging = Staging(runtime, 64, count=2, most=5)
    for size_bytes, count in ((0, 2), (129, 3), (64, 3), (64 * 1000, 5)):
        staging.reserve(size_bytes)
        assert pinned == [64] * count
    values, target = np.arange(200.0), _array(runtime, 200, "float64")
    staging.upload(target, values)
    np.testing.assert_array_equal(staging.download(target), values)
