"""Device memory of the emulated device: zeroed, aligned, counted, and guarded."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES
from hpctrain.backend.cuda.emulator.memory import Heap, on_host


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
