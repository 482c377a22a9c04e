"""Memory that is guarded and counted, and the emulated device's convolutions and products, each rounded once."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, ConvolutionKey, DeviceArray, Precision, bfloat16_values
from hpctrain.backend.specs import item_bytes
from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import EmulatedDeviceError, Heap, PinnedMemory, borrowed, read, write
from hpctrain_testing.emulator.products import check_product


def test_memory_in_use_is_counted() -> None:
    heap = Heap()
    first, second = heap.allocate(1000), heap.allocate(24)
    assert heap.used_bytes == 1024
    view = first[10:20]
    del first
    gc.collect()
    assert heap.used_bytes == 1024
    del view
    gc.collect()
    assert heap.used_bytes == second.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 100, 256, 4000])
@pytest.mark.parametrize("place", ["in front of", "after"])
def test_writes_outside_an_array_are_found(size: int, place: str) -> None:
    heap = Heap()
    array = heap.allocate(size)
    assert heap.damages() == []
    address = array.pointer - 1 if place == "in front of" else array.pointer + size
    if place == "after" and size % ALIGNMENT_BYTES == 0:
        return  # there begins the page that may not be touched
    ctypes.memset(address, 0, 1)
    assert heap.damages() == [f"bytes {place} an array of {size} bytes were written"]
    del array
    gc.collect()
    assert heap.damages() == [f"bytes {place} an array of {size} bytes were written"]  # also of what was freed meanwhile
    assert heap.damages() == []


def test_what_is_outside_an_array_is_no_number() -> None:
    array = Heap().allocate(100)
    for dtype in (np.float64, np.float32):
        outside = np.frombuffer(ctypes.string_at(array.pointer - 64, 64), dtype)
        assert np.isnan(outside).all()
    assert np.isnan(bfloat16_values(np.frombuffer(ctypes.string_at(array.pointer - 64, 64), np.uint16))).all()


def test_freed_memory_is_not_given_again_soon() -> None:
    heap = Heap()
    kept, addresses = heap.allocate(100), set()
    for _ in range(100):
        addresses.add(heap.allocate(100).pointer)
    assert len(addresses) == 100
    address = addresses.pop()
    assert heap.describe(address + 3) == "it is byte 3 of a freed array of 100 bytes"
    assert heap.describe(kept.pointer + 103) == "it is 3 bytes past the end of an array of 100 bytes"
    assert heap.describe(kept.pointer - 3) == "it is 3 bytes in front of an array of 100 bytes"
    assert heap.describe(8) == "it is near no array of this device"


def test_arrays_lie_in_memory_that_is_in_use() -> None:
    heap = Heap()
    array = heap.allocate(100)
    heap.require(array, array[10:20], array[100:], borrowed(array))
    place = borrowed(array)
    outside = DeviceArray(array.pointer + 96, (8,), "uint8", None)
    with pytest.raises(EmulatedDeviceError, match="is not in memory in use: it is byte 96 of an array"):
        heap.require(outside)
    del array
    with pytest.raises(EmulatedDeviceError, match="it is byte 0 of a freed array of 100 bytes"):
        heap.require(place)


def test_memory_is_not_zeroed() -> None:
    assert np.isnan(PinnedMemory().allocate(40).view(np.float32)).all()


def test_other_memory_is_refused() -> None:
    pinned = PinnedMemory()
    memory = pinned.allocate(48)
    with pytest.raises(ValueError, match="needs pinned memory"):
        pinned.require(np.zeros(3))
    with pytest.raises(ValueError, match="needs contiguous memory"):
        pinned.require(memory[::2])
    with pytest.raises(ValueError, match="needs pinned memory"):
        PinnedMemory().require(memory)
    address = memory.ctypes.data
    del memory
    assert address not in pinned._ends


def _placed(device: EmulatedDevice, values: np.ndarray, dtype: str) -> DeviceArray:
    array = device.allocate(values.size * item_bytes(dtype)).view(dtype).reshape(values.shape)
    write(array, values)
    return array


KEY = ConvolutionKey("forward", (2, 4, 4, 4), (8, 3, 3, 4), (2, 4, 4, 8), (1, 1), (1, 1, 1, 1), (1, 1), 1, "float32", "tf32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (0, 4, 4, 4), "y": (0, 4, 4, 8)}, "empty array"),
        ({"x": (2, 4, 4, 5)}, "cannot be divided into 1 groups"),
        ({"groups": 3, "w": (8, 3, 3, 4), "x": (2, 4, 4, 12)}, "cannot be divided into 3 groups"),
        ({"precision": "bfloat16"}, "in bfloat16 must have dtype bfloat16, not float32"),
        ({"dtype": "bfloat16"}, "in tf32 must have dtype float32, not bfloat16"),
        ({"fused": "bias", "kind": "input"}, "Only forward convolutions can be fused"),
        ({"padding": (-1, 1, 1, 1), "y": (2, 2, 4, 8)}, "Padding must be at least 0"),
        ({"y": (2, 3, 4, 8)}, "does not fit its input"),
    ],
)
def test_keys_without_a_plan_are_refused(changes: dict[str, Any], message: str) -> None:
    EmulatedDevice().convolution(KEY)
    with pytest.raises(BackendError, match=message):
        EmulatedDevice().convolution(replace(KEY, **changes))


def test_arrays_are_those_of_the_key() -> None:
    device = EmulatedDevice()
    x, w, y = (device.allocate(1024 * 4).view("float32")[: int(np.prod(shape))].reshape(shape) for shape in (KEY.x, KEY.w, KEY.y))
    workspace, bias = device.allocate(300), device.allocate(32).view("float32")
    stream, plain = device.stream("compute"), device.convolution(KEY)
    fused = device.convolution(replace(KEY, fused="bias"))
    misaligned = device.allocate(4096).view("float32")[1 : 1 + x.size].reshape(x.shape)
    for convolution, arguments, message in (
        (plain, (w, x, y, workspace), "a of a convolution forward is float32"),
        (plain, (x, w.reshape(-1), y, workspace), "b of a convolution forward is float32"),
        (plain, (x.reshape(-1).view("bfloat16"), w, y, workspace), "a of a convolution"),
        (plain, (misaligned, w, y, workspace), "aligned to 16 bytes"),
        (plain, (x, w, y, None), "workspace must have 256 aligned bytes"),
        (plain, (x, w, y, workspace[:200]), "workspace must have"),
        (plain, (x, w, y, workspace[16:]), "workspace must have"),
        (plain, (x, w, y, y.reshape(-1).view("uint8")), "overlaps its inputs or its workspace"),
        (plain, (x, w, y, workspace, bias), "A bias must be passed exactly if the key has one"),
        (fused, (x, w, y, workspace), "A bias must be passed exactly if the key has one"),
        (fused, (x, w, y, workspace, bias[:4]), "The bias of"),
    ):
        with pytest.raises(ValueError, match=message):
            convolution.run(stream, *arguments)


def test_nothing_is_left_in_the_workspace() -> None:
    device = EmulatedDevice()
    x, w, y = (_placed(device, np.ones(shape), "float32") for shape in (KEY.x, KEY.w, KEY.y))
    workspace = device.allocate(256)
    device.convolution(KEY).run(device.stream("compute"), x, w, y, workspace)
    assert np.isnan(read(workspace.view("float32"))).all()


HEAP = Heap()


def _array(shape: tuple[int, ...], dtype: str, values: np.ndarray | None = None) -> DeviceArray:
    array = HEAP.allocate(int(np.prod(shape)) * item_bytes(dtype)).view(dtype).reshape(shape)
    if values is not None:
        write(array, values)
    return array


@pytest.mark.parametrize(
    ("shapes", "dtypes", "precision"),
    [
        (((4, 3), (3, 5), (4, 6)), ("float32",) * 3, "float32"),
        (((4, 3), (4, 5), (4, 5)), ("float32",) * 3, "float32"),
        (((12,), (3, 5), (4, 5)), ("float32",) * 3, "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float32", "bfloat16", "float32"), "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float32", "float32", "bfloat16"), "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float64", "float64", "float32"), "float64"),
        (((4, 3), (3, 5), (4, 5)), ("bfloat16",) * 3, "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float32",) * 3, "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: list[tuple[int, ...]], dtypes: list[str], precision: Precision) -> None:
    arrays = [_array(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match="product"):
        check_product(*arrays, transpose_a=False, transpose_b=False, precision=precision)
