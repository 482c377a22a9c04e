"""Sums of squares and finiteness of many arrays at once, the same bits in every order of blocks and threads."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.staging import Staging
from hpctrain.backend.kernels.cuda.sums import TILE, ArrayTable
from tests.support.emulated import CudaKernelsFactory

SIZES = (0, 5, TILE + 3, 0, 7, 2 * TILE, 1, 0)


def _placed(kernels: CudaKernelSet, dtype: str) -> tuple[list[np.ndarray], list[DeviceArray]]:
    """Arrays that lie one behind another, so that most do not begin where packs may."""
    flat = kernels.arithmetic.zeros(sum(SIZES), dtype)
    kernels.arithmetic.from_host(flat, np.random.default_rng(3).standard_normal(sum(SIZES)))
    stops = np.cumsum(SIZES)
    arrays = [flat[int(stop) - size : int(stop)] for size, stop in zip(SIZES, stops, strict=True)]
    return [kernels.arithmetic.to_host(array) for array in arrays], arrays


def _table(kernels: CudaKernelSet, arrays: list[DeviceArray]) -> ArrayTable:
    return ArrayTable(kernels.runtime, arrays, Staging(kernels.runtime, 4096, count=1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_square_sums_are_float64_and_the_same_in_all_orders(cuda_kernels: CudaKernelsFactory, dtype: str) -> None:
    bits = []
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        values, arrays = _placed(kernels, dtype)
        sums = _table(kernels, arrays).square_sums().result()
        assert sums.dtype == np.float64
        np.testing.assert_allclose(sums, [np.square(x, dtype=np.float64).sum() for x in values], rtol=1e-14)
        alone = [float(_table(kernels, [array]).square_sums().result()[0]) for array in arrays if array.size < TILE]
        assert alone == [float(total) for total, array in zip(sums, arrays, strict=True) if array.size < TILE]
        bits.append(sums.tobytes())
    assert len(set(bits)) == 1


def test_tables_are_read_again_for_each_sum(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    _, arrays = _placed(kernels, "float32")
    table = _table(kernels, arrays)
    first = table.square_sums().result().copy()
    kernels.arithmetic.fill(arrays[1], 3)
    second = table.square_sums().result()
    assert second[1] == 45
    np.testing.assert_array_equal(np.delete(second, 1), np.delete(first, 1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("seed", range(2))
def test_one_element_that_is_not_finite_shows_in_its_array_alone(
    cuda_kernels: CudaKernelsFactory, dtype: str, value: float, seed: int
) -> None:
    kernels = cuda_kernels(seed=seed)
    _, arrays = _placed(kernels, dtype)
    table = _table(kernels, arrays)
    for i, place in ((1, 4), (2, TILE + 1), (4, 0), (5, TILE - 1)):
        kernels.arithmetic.fill(arrays[i][place : place + 1], value)
        expected = [k != i for k in range(len(arrays))]
        np.testing.assert_array_equal(table.finite().result(), expected)
        kernels.arithmetic.fill(arrays[i], 3e38)
        assert table.finite().result().all()


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_look_at_several_tiles(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    values = np.random.default_rng(0).standard_normal((40, 1024)).astype(np.float32)
    flat = kernels.arithmetic.zeros(values.size, "float32")
    kernels.arithmetic.from_host(flat, values.reshape(-1))
    table = _table(kernels, [flat[1024 * i : 1024 * (i + 1)] for i in range(40)])
    np.testing.assert_allclose(table.square_sums().result(), np.square(values, dtype=np.float64).sum(1), rtol=1e-14)
    kernels.arithmetic.fill(flat[20000:20001], np.inf)
    np.testing.assert_array_equal(table.finite().result(), np.arange(40) != 20000 // 1024)


def test_arrays_of_two_dtypes_are_refused(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    arrays = [kernels.arithmetic.zeros(3, dtype) for dtype in ("float32", "bfloat16")]
    with pytest.raises(AssertionError, match="one dtype"):
        _table(kernels, arrays)
