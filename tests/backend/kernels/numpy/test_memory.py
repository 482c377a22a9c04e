"""Buffers: zeroed, aligned, and divided without overlap."""

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.memory import allocate, carve, total_bytes


@pytest.mark.parametrize("size", [0, 1, 4097, 5 << 20])
def test_buffers_are_zeroed_aligned_and_writable(size: int) -> None:
    buffer = allocate(size)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (size,)
    assert not buffer.any()
    assert size == 0 or buffer.ctypes.data % 64 == 0
    buffer[...] = 1


def test_carved_arrays_are_aligned_and_apart() -> None:
    requests = [((3, 5), "float32"), ((7,), "bool"), ((0, 4), "float64"), ((2, 9), "float64"), ((1,), "uint8")]
    buffer = allocate(total_bytes(requests))
    arrays = carve(buffer, requests)
    for i, (array, (shape, dtype)) in enumerate(zip(arrays, requests, strict=True)):
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0 or array.size == 0
        array[...] = i % 2
    for i, array in enumerate(arrays):
        assert (array == i % 2).all()


def test_nothing_is_carved_from_no_buffer() -> None:
    (array,) = carve(None, [((0, 3), "float32")])
    assert array.shape == (0, 3)
