"""The emulated device does what `Device` says."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Device
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes


def _placed(device: EmulatedDevice, values: np.ndarray, dtype: str) -> DeviceArray:
    array = device.allocate(values.size * item_bytes(dtype)).view(dtype).reshape(values.shape)
    write(array, values)
    return array


def test_copies_go_there_and_back() -> None:
    device: Device = EmulatedDevice()
    stream = device.stream("compute")
    source, target = device.pinned(40), device.pinned(40)
    source[:] = np.arange(40)
    first, second = device.allocate(40), device.allocate(40).view("float32")
    device.upload(stream, first, source)
    device.copy(stream, second, first)
    device.download(stream, target, second)
    stream.synchronize()
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_gemm(transpose_a: bool, transpose_b: bool, accumulate: bool) -> None:
    random, device = np.random.default_rng(1), EmulatedDevice()
    a, b, c = (random.standard_normal(shape) for shape in ((4, 3), (3, 5), (4, 5)))
    arrays = [_placed(device, m, "float64") for m in (a.T if transpose_a else a, b.T if transpose_b else b, c)]
    stream = device.stream("compute")
    device.gemm(stream, *arrays, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate, precision="float64")
    stream.synchronize()
    np.testing.assert_allclose(read(arrays[2]), a @ b + c * accumulate, rtol=1e-13)


def test_memory_in_use() -> None:
    device = EmulatedDevice()
    array = device.allocate(1000)
    assert device.memory_used() == 1000
    del array
    assert device.memory_used() == 0
