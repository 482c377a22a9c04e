"""Arguments of kernels: number, kind and size."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Argument, Extent
from hpctrain.backend.cuda.emulator.kernel import pack_arguments
from hpctrain.backend.cuda.emulator.memory import Heap, on_host
from tests.support.emulated import EmulatedDeviceFactory

PARAMETERS = ("pointer float32", "pointer void", "int32", "float64", "bytes 16")
PLACE = Heap().allocate(16)
STRUCTURE = np.zeros((), "f4,f4,f8")[()]


def _arguments(**changed: Argument) -> list[Argument]:
    """Arguments that fit, but those of these places."""
    fitting = [PLACE.view("float32"), PLACE, np.int32(-1), np.float64(1), STRUCTURE]
    return [changed.get(f"at{i}", argument) for i, argument in enumerate(fitting)]


def test_arguments_are_packed_as_the_kernel_takes_them() -> None:
    place = PLACE.pointer.to_bytes(8, "little")
    assert pack_arguments("k", PARAMETERS, _arguments()) == [place, place, b"\xff" * 4, np.float64(1).tobytes(), bytes(16)]
    assert pack_arguments("k", PARAMETERS, _arguments(at0=None, at1=None))[:2] == [bytes(8)] * 2
    assert pack_arguments("k", ["pointer uint8"], [PLACE.view("bool")]) == [place]
    assert pack_arguments("k", ["pointer float32"], [np.uint64(PLACE.pointer)]) == [place]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_arguments()[:4], "k takes 5 arguments, not 4"),
        ([*_arguments(), None], "k takes 5 arguments, not 6"),
        (_arguments(at2=np.int64(3)), "Argument 2 of k is int64; the kernel takes int32"),
        (_arguments(at2=np.float32(3)), "Argument 2 of k is float32; the kernel takes int32"),
        (_arguments(at2=np.uint32(3)), "Argument 2 of k is uint32; the kernel takes int32"),
        (_arguments(at3=np.float32(3)), "Argument 3 of k is float32; the kernel takes float64"),
        (_arguments(at2=3), "Argument 2 of k is int; kernels take device arrays and NumPy scalars"),
        (_arguments(at0=np.zeros(4, np.float32)), "Argument 0 of k is ndarray"),
        (_arguments(at0=np.int64(3)), "Argument 0 of k is int64; the kernel takes pointer float32"),
        (_arguments(at2=None), "Argument 2 of k is a place in memory; the kernel takes int32"),
        (_arguments(at0=PLACE.view("bfloat16")), "Argument 0 of k is .*bfloat16.*; the kernel takes elements of float32"),
        (_arguments(at0=PLACE[2:6].view("float32")), "Argument 0 of k is .* not aligned to its elements"),
        (_arguments(at4=np.zeros((), "f4,f4")[()]), "Argument 4 of k is bytes 8; the kernel takes bytes 16"),
    ],
)
def test_others_are_refused(arguments: list[Argument], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack_arguments("k", PARAMETERS, arguments)


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((1,), (2048,)),
        ((1,), (32, 33)),
        ((1,), (1, 1, 65)),
        ((0,), (32,)),
        ((1,), (0,)),
        ((1, 65536), (32,)),
        ((1, 1, 65536), (32,)),
        ((1 << 31,), (32,)),
        ((1, 1, 1, 1), (32,)),
        ((), (32,)),
    ],
)
def test_impossible_launches_are_refused(emulated_device: EmulatedDeviceFactory, grid: Extent, block: Extent) -> None:
    device = emulated_device(0)
    kernel = device.kernel("elementwise", "relu_forward_f32_w1")
    x = device.allocate(4).view("float32")
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
