"""Sums over rows: right for any shape, the same bits in any order of blocks and threads, few rows in one launch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.memory import on_host
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes, parameter_dtype
from hpctrain.backend.kernels.cuda.column_sums import ColumnSums
from hpctrain.backend.kernels.cuda.operator import carve, total_bytes
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime


def array(device: EmulatedDevice, shape: tuple[int, ...], dtype: str) -> DeviceArray:
    return device.allocate(int(np.prod(shape)) * item_bytes(dtype)).view(dtype).reshape(shape)


def sums(values: np.ndarray, dtype: str, seed: int, relu: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The sums over the rows of `values`, by kernels that find NaN in scratch and result; and what becomes of `values`."""
    device = EmulatedDevice(seed)
    x, out = array(device, values.shape, dtype), array(device, values.shape[1:], parameter_dtype(dtype))
    write(x, values)
    write(out, np.full(out.shape, np.nan))
    plan = ColumnSums(*values.shape, dtype, CudaRuntime(device, device.stream("compute"), dtype))
    scratch = device.allocate(total_bytes([plan.scratch]))
    on_host(scratch)[...] = 0xFF
    output = None
    if relu is not None:
        output = array(device, relu.shape, dtype)
        write(output, relu)
    plan.run(x, out, *carve(scratch, [plan.scratch]), relu=output)
    return read(out).copy(), read(x).copy()


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=25)
@given(
    rows=st.one_of(st.integers(0, 9), st.integers(500, 1500)),
    columns=st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 72, 257, 600])),
    dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
    relu=st.booleans(),
)
def test_equals_numpy_in_every_order(rows: int, columns: int, dtype: str, relu: bool) -> None:
    random = np.random.default_rng(rows)
    values, output = (random.integers(-8, 9, (rows, columns)) / 8 for _ in range(2))  # sums are exact in every dtype of sums
    expected = np.where(output > 0, values, 0.0) if relu else values
    for seed in (0, 1, 3):
        total, after = sums(values, dtype, seed, output if relu else None)
        np.testing.assert_array_equal(total, expected.sum(axis=0))
        np.testing.assert_array_equal(after, expected)


def test_rounded_sums_have_the_same_bits_in_every_order(emulated_device) -> None:
    values = np.random.default_rng(0).standard_normal((2000, 24))
    results = [sums(values, "float32", seed)[0] for seed in (0, 1, 4)]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize(("rows", "launches"), [(0, 1), (100, 1), (100_000, 2)])
def test_few_rows_need_one_launch(emulated_device, rows: int, launches: int) -> None:
    device = emulated_device()
    grids = []
    device.kernel = lambda source, name: lambda stream, grid, block, *arguments: grids.append(grid)
    plan = ColumnSums(rows, 64, "bfloat16", CudaRuntime(device, device.stream("compute"), "bfloat16"))
    nowhere = DeviceArray(0, (rows, 64), "bfloat16", None)
    plan.run(nowhere, DeviceArray(0, (64,), "float32", None), DeviceArray(0, *plan.scratch, None))
    assert len(grids) == launches
    assert grids[-1][1] == 1
    assert grids[0][1] == max(1, plan.scratch[0][0])
