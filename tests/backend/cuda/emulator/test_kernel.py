"""Arguments of kernels: number, kind and size."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Argument, Extent
from hpctrain.backend.cuda.emulator.kernel import pack_arguments
from hpctrain.backend.cuda.emulator.memory import Heap, on_host
from tests.support.emulated import EmulatedDeviceFactory


def test_arguments_are_packed_as_the_kernel_takes_them() -> None:
    array = Heap().allocate(4)
    packed = pack_arguments("k", [8, 8, 4, 8], [array, None, np.int32(-1), np.float64(1)])
    assert packed == [array.pointer.to_bytes(8, "little"), bytes(8), b"\xff" * 4, np.float64(1).tobytes()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "k takes 2 arguments, not 1"),
        ((None, None, None), "k takes 2 arguments, not 3"),
        ((None, np.int64(3)), "Argument 1 of k has 8 bytes, the kernel takes 4"),
        ((np.float32(3), np.int32(3)), "Argument 0 of k has 4 bytes, the kernel takes 8"),
        ((None, 3), "Argument 1 of k is int; kernels take device arrays and NumPy scalars"),
        ((np.zeros(3), np.int32(3)), "Argument 0 of k is ndarray"),
    ],
)
def test_others_are_refused(arguments: tuple[Argument, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack_arguments("k", [8, 4], arguments)


@pytest.mark.parametrize(("grid", "block"), [((1,), (2048,)), ((1,), (32, 33)), ((0,), (32,)), ((1,), (0,))])
def test_impossible_launches_are_refused(emulated_device: EmulatedDeviceFactory, grid: Extent, block: Extent) -> None:
    device = emulated_device(0)
    kernel = device.kernel("elementwise", "relu_forward_f32_w1")
    x = device.allocate(4)
    with pytest.raises(ValueError, match="cannot be launched"):
        kernel(device.stream("compute"), grid, block, x, x, np.int64(1))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_kernel_computes(emulated_device: EmulatedDeviceFactory, seed: int) -> None:
    device = emulated_device(seed)
    stream, x = device.stream("compute"), device.allocate(400).view("float32")
    on_host(x)[:] = np.arange(100) - 50
    device.kernel("elementwise", "relu_forward_f32_w1")(stream, (3,), (32,), x, x, np.int64(100))
    stream.synchronize()
    np.testing.assert_array_equal(on_host(x), np.maximum(np.arange(100) - 50, 0))
