"""Checksums of arrays on a device are zlib's, and each flipped bit is noticed, whatever the order of blocks and threads."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.checksums import TILE, checksum_of_zeros
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from tests.support.emulated import CudaKernelsFactory

SIZES = (0, 5, TILE + 3, 0, 255, 256, 257, 2 * TILE, 1, 3 * TILE - 1, 0)


def _placed(kernels: CudaKernelSet, dtype: str) -> tuple[list[np.ndarray], list[DeviceArray]]:
    """Arrays of 32-bit or 64-bit numbers, one behind another."""
    flat = kernels.arithmetic.zeros(sum(SIZES), dtype)
    kernels.arithmetic.from_host(flat, np.random.default_rng(5).standard_normal(sum(SIZES)))
    stops = np.cumsum(SIZES)
    arrays = [flat[int(stop) - size : int(stop)] for size, stop in zip(SIZES, stops, strict=True)]
    return [kernels.arithmetic.to_host(array) for array in arrays], arrays


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(3))
def test_checksums_are_those_of_the_host(cuda_kernels: CudaKernelsFactory, dtype: str, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    values, arrays = _placed(kernels, dtype)
    checksums = kernels.arithmetic.watched(arrays).checksums()
    for _ in range(2):
        np.testing.assert_array_equal(checksums.fetch().result(), [zlib.crc32(array.tobytes()) for array in values])
        assert checksums.fetch().result().dtype == np.uint32
        kernels.arithmetic.fill(arrays[7], 3)
        values[7] = np.full(SIZES[7], 3, dtype)


def test_sums_are_of_the_words_of_each_array(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    values, arrays = _placed(kernels, "float32")
    expected = [int(array.view(np.uint32).sum(dtype=np.uint64)) % (1 << 32) for array in values]
    assert kernels.arithmetic.watched(arrays).sums().fetch().result().tolist() == expected


def test_checksums_are_of_the_point_at_which_they_are_asked_for(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    values, arrays = _placed(kernels, "float32")
    fetch = kernels.arithmetic.watched(arrays).checksums().fetch()
    kernels.arithmetic.fill(arrays[2], 1)
    np.testing.assert_array_equal(fetch.result(), [zlib.crc32(array.tobytes()) for array in values])


@given(size=st.integers(0, 1 << 12))
def test_zeros_have_the_checksum_of_as_many_bytes(size: int) -> None:
    assert checksum_of_zeros(size) == zlib.crc32(bytes(size))


def _flip(kernels: CudaKernelSet, array: DeviceArray, word: int, bit: int) -> None:
    bits = kernels.arithmetic.to_host(array).copy()
    bits.view(np.uint32)[word] ^= np.uint32(1 << bit)
    kernels.arithmetic.from_host(array, bits)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(2))
def test_a_guard_marks_the_arrays_with_a_flipped_bit(cuda_kernels: CudaKernelsFactory, dtype: str, seed: int) -> None:
    kernels, random = cuda_kernels(seed=seed), np.random.default_rng(seed)
    _, arrays = _placed(kernels, dtype)
    guard = kernels.arithmetic.watched(arrays).guard()
    guard.remember()
    guard.compare()
    assert not guard.fetch_changed().result().any()
    marked = np.zeros(len(arrays), bool)
    for number in random.permutation([number for number, array in enumerate(arrays) if array.size]).tolist():
        _flip(kernels, arrays[number], int(random.integers(arrays[number].nbytes // 4)), int(random.integers(32)))
        guard.compare()
        marked[number] = True
        np.testing.assert_array_equal(guard.fetch_changed().result(), marked)
        guard.remember()
    kernels.wait()


def test_what_is_remembered_is_what_is_there_at_that_point(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    _, arrays = _placed(kernels, "float32")
    guard = kernels.arithmetic.watched(arrays).guard()
    kernels.arithmetic.fill(arrays[2], 1)
    guard.remember()
    guard.compare()
    kernels.arithmetic.fill(arrays[4], 1)  # behind the comparison
    assert not guard.fetch_changed().result().any()
    guard.compare()
    np.testing.assert_array_equal(np.flatnonzero(guard.fetch_changed().result()), [4])


def test_arrays_of_two_bytes_are_refused(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    with pytest.raises(AssertionError, match="words of 4 bytes"):
        kernels.arithmetic.watched([kernels.arithmetic.zeros(3, "bfloat16")]).checksums()
