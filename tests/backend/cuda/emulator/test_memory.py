"""Device memory of the emulated device: zeroed, aligned, counted, and guarded."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.cuda.emulator.memory import Heap, borrowed, on_host
from hpctrain.backend.cuda.half import bfloat16_values


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 4096, 10_000])
def test_memory_is_zeroed_and_aligned(size: int) -> None:
    array = Heap().allocate(size)
    assert array.pointer % ALIGNMENT_BYTES == 0
    assert on_host(array).tobytes() == bytes(size)


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


def test_the_host_sees_the_same_memory() -> None:
    array = Heap().allocate(24).view("float32").reshape(2, 3)
    on_host(array)[1] = 7
    np.testing.assert_array_equal(on_host(array[1:]), np.full((1, 3), 7, np.float32))


@pytest.mark.parametrize("size", [0, 1, 100, 256, 4000])
@pytest.mark.parametrize("place", ["in front of", "behind"])
def test_writes_beside_an_array_are_found(size: int, place: str) -> None:
    heap = Heap()
    array = heap.allocate(size)
    assert heap.damages() == []
    address = array.pointer - 1 if place == "in front of" else array.pointer + size
    if place == "behind" and size % ALIGNMENT_BYTES == 0:
        return  # there begins the page that nobody may touch
    ctypes.memset(address, 0, 1)
    assert heap.damages() == [f"bytes {place} an array of {size} bytes were written"]
    del array
    gc.collect()
    assert heap.damages() == [f"bytes {place} an array of {size} bytes were written"]  # also of what was freed meanwhile
    assert heap.damages() == []


def test_what_is_beside_an_array_is_no_number() -> None:
    array = Heap().allocate(100)
    for dtype in (np.float64, np.float32):
        beside = np.frombuffer(ctypes.string_at(array.pointer - 64, 64), dtype)
        assert np.isnan(beside).all()
    assert np.isnan(bfloat16_values(np.frombuffer(ctypes.string_at(array.pointer - 64, 64), np.uint16))).all()


def test_freed_memory_is_not_given_again_soon() -> None:
    heap = Heap()
    kept, addresses = heap.allocate(100), set()
    for _ in range(100):
        addresses.add(heap.allocate(100).pointer)
    assert len(addresses) == 100
    address = addresses.pop()
    assert heap.describe(address + 3) == "it is byte 3 of a freed array of 100 bytes"
    assert heap.describe(kept.pointer + 103) == "it is 3 bytes behind the end of an array of 100 bytes"
    assert heap.describe(kept.pointer - 3) == "it is 3 bytes in front of an array of 100 bytes"
    assert heap.describe(8) == "it is near no array of this device"


def test_arrays_lie_in_memory_that_is_in_use() -> None:
    heap = Heap()
    array = heap.allocate(100)
    heap.require(array, array[10:20], array[100:], borrowed(array))
    place = borrowed(array)
    outside = DeviceArray(array.pointer + 96, (8,), "uint8", None)
    with pytest.raises(EmulatedDeviceError, match="does not lie in memory that is in use: it is byte 96 of an array"):
        heap.require(outside)
    del array
    with pytest.raises(EmulatedDeviceError, match="it is byte 0 of a freed array of 100 bytes"):
        heap.require(place)


def test_the_host_looks_at_memory_when_all_work_is_done() -> None:
    settled = []
    array = Heap(lambda: settled.append(True)).allocate(8)
    on_host(borrowed(array))
    assert not settled
    on_host(array[2:])
    assert settled
